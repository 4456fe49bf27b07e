"""ContractSearch: penalty clauses of a long contract, whatever they are called.

Ninety to two hundred clauses, tens of thousands of characters; the sums to find hide behind
liquidated damages, late fees, forfeits, service credits, 违约金, 滞纳金, 扣减 and more, beside
caps, deposits and struck-out clauses. The search is SQLite FTS5: stems in English, trigrams in
Chinese. Budget unit: the calls of a direct solution.
"""

from __future__ import annotations

import hashlib
import json

from sandbox.catalog.contract_search.contract import WORDS, Contract, Penalty, draw_contract
from sandbox.catalog.draws import Draws
from sandbox.catalog.generated import Accepts, Call, Drawn, GeneratedFamily

SEARCHES = {
    "en": (
        "liquidated damages penalty forfeit fine indemnity",
        '"late fee" "reminder charge" "service credit" "break fee" deduct surcharge compensates',
    ),
    "zh": ("违约金 滞纳金 罚金 赔偿 补偿", "扣减 抵扣 解约金 损失费 加收款 催告费用"),
}


class ContractSearch(GeneratedFamily):
    """The family; task types are the language of the contract."""

    name = "contract_search"

    def draw(self, draws: Draws, task_type: str, accepts: Accepts) -> Drawn | None:
        """See ``GeneratedFamily``."""
        words = WORDS[task_type]
        contract = draw_contract(draws, task_type)
        asked = draws.choice(contract.penalties)
        one = draws.below(3) == 0
        found = [asked] if one else [p for p in contract.penalties if p.payer == asked.payer]
        question = words.QUESTIONS["breach" if one else "payer"].format(
            payer=asked.payer, breach=words.BREACHES[asked.breach][0]
        )
        if not accepts(f"{fingerprint(contract)}|{question}"):
            return None
        rounds = _solution(contract, found)
        return Drawn(
            instruction=words.QUESTIONS["frame"].format(question=question),
            world={
                "language": task_type,
                "clauses": [list(clause) for clause in contract.clauses],
            },
            judge={
                "clauses": {penalty.number: penalty.amount for penalty in found},
                "contract_sha256": fingerprint(contract),
            },
            units={"calls": float(sum(len(turn) for turn in rounds))},
            rounds=rounds,
            final_text="\n".join(f"{penalty.number} {penalty.amount}" for penalty in found),
        )


def fingerprint(contract: Contract) -> str:
    """As ``end_state`` in tools.py computes it."""
    text = json.dumps([list(clause) for clause in contract.clauses], ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _solution(contract: Contract, found: list[Penalty]) -> tuple[tuple[Call, ...], ...]:
    """Two searches, then every clause of the answer in one turn."""
    searches = [(("search", {"query": query}),) for query in SEARCHES[contract.language]]
    reads = tuple(("read_clause", {"number": penalty.number}) for penalty in found)
    return (*searches, reads)
