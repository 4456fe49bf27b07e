"""Which cold blocks does this question need? The router names them before the turn starts.

A cold block keeps its text, a summary vector for every chunk of that text, and postings of its
words and synonym clusters (facts/kv-attention.md 1.2 and 4.2). Summaries route, they never stand
in for a fact: what a block says comes back with its keys and values. They are made from source
text only, once, so evicting and warming a block again cannot change them.

    router = ColdRouter(MiniLMEncoder(), SynonymTable.load())
    router.add({7: "text of block 7", 8: "..."})
    router.route("what is the late fee?", budget=16).block_ids
"""

from engine.kvcache.router.config import RouterConfig
from engine.kvcache.router.encoder import HashingEncoder, SummaryEncoder, check_encoder
from engine.kvcache.router.minilm import MiniLMEncoder
from engine.kvcache.router.router import ColdRouter, RankedBlock, Route
from engine.kvcache.router.synonyms import SynonymTable

__all__ = [
    "ColdRouter",
    "HashingEncoder",
    "MiniLMEncoder",
    "RankedBlock",
    "Route",
    "RouterConfig",
    "SummaryEncoder",
    "SynonymTable",
    "check_encoder",
]
