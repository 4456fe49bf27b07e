#!/bin/bash
wc -w < /app/data/text.txt | tr -d " " > /app/count.txt
