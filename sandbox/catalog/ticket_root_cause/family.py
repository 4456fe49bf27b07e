"""TicketRootCause: the cause of an incident in a store of 100,000 support dialogues.

One version of one product has a wave of complaints from some day on. Its dialogues name the
confirmed cause here and there, and one that was ruled out; dialogues about the same symptom in
other versions name other causes. The store is written and indexed in the box by ``setup`` (a few
seconds, no host file is shared); every tool answers with its latency. Budget unit: the calls of a
direct solution.
"""

from __future__ import annotations

from datetime import date, timedelta
from typing import Any

from sandbox.catalog.draws import Draws
from sandbox.catalog.generated import Accepts, Drawn, GeneratedFamily
from sandbox.catalog.ticket_root_cause.words import SEARCH, WORDS

NUM_TICKETS = 100_000
NUM_DAYS = 90
NUM_VERSIONS = 5
SENT = ("customer", "agent", "regions", "channels", "greetings", "topics", "questions", "details",
        "replies", "findings", "rumours", "closings", "components")  # fmt: skip
"""Words the box needs."""


class TicketRootCause(GeneratedFamily):
    """The family; task types are the language of the dialogues."""

    name = "ticket_root_cause"

    def draw(self, draws: Draws, task_type: str, accepts: Accepts) -> Drawn | None:
        """See ``GeneratedFamily``."""
        words = WORDS[task_type]
        products = {name: _versions(draws) for name in words["products"]}
        first_day = date(draws.between(2021, 2025), draws.between(1, 12), draws.between(1, 28))
        since = first_day + timedelta(days=draws.between(55, 80))
        product = draws.choice(sorted(products))
        topic = draws.choice(sorted(words["topics"]))
        component, ruled_out = draws.sample(words["components"], 2)
        incident = {
            "since": since.isoformat(),
            "product": product,
            "version": draws.choice(products[product]),
            "topic": topic,
            "component": component,
            "ruled_out": ruled_out,
            "num_tickets": draws.between(450, 750),
        }
        world: dict[str, Any] = {
            "language": task_type,
            "seed": draws.below(1 << 31),
            "num_tickets": NUM_TICKETS,
            "first_day": first_day.isoformat(),
            "num_days": NUM_DAYS,
            "incident": incident,
            "words": _sent(words, products),
        }
        if not accepts(f"{incident}|{first_day}|{world['seed']}"):
            return None
        version = incident["version"]
        narrow = {"product": product, "since": incident["since"]}
        return Drawn(
            instruction=words["instruction"].format(
                since=incident["since"], product=product, symptom=words["symptoms"][topic]
            ),
            world=world,
            judge={"version": version, "component": component},
            units={"calls": 3.0},
            rounds=(
                (("count_by", {"field": "version", **narrow}),),
                (("search", {"query": SEARCH[task_type], **narrow, "version": version}),),
                (("count_by", {"field": "day", **narrow, "version": version}),),
            ),
            final_text=f"{version} {component}",
        )


def _versions(draws: Draws) -> list[str]:
    """Different releases, as strings."""
    major = draws.between(2, 9)
    minors = sorted(draws.sample(range(10), NUM_VERSIONS))
    return [f"{major}.{minor}.{draws.below(10)}" for minor in minors]


def _sent(words: dict[str, Any], products: dict[str, list[str]]) -> dict[str, Any]:
    """JSON: lists, and the topics in a fixed order."""
    sent = {key: list(words[key]) if isinstance(words[key], tuple) else words[key] for key in SENT}
    topics = {name: list(texts) for name, texts in words["topics"].items()}
    return {**sent, "topics": topics, "topic_names": sorted(topics), "products": products}
