#!/bin/sh
# Plain Harbor starts here; PARL calls tests/verify.py itself.
exec python3 -I /tests/harbor.py
