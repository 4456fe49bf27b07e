"""The router's knobs; they live where configurations load without torch."""

from engine.kvcache.config import RouterConfig as RouterConfig
