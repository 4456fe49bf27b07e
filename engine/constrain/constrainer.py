"""Constrainer: constraints of requests compiled, kept, and handed out as guides of steps."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any

from engine.chat.vocabulary import Vocabulary
from engine.constrain.grammar import grammar_of
from engine.constrain.guide import Guide
from engine.constrain.shortest import Completer
from engine.constrain.symbols import Symbols
from engine.errors import ConstraintError, NotSupportedError
from engine.runtime.types import Constraint, StepRequest

_CACHE_SIZE = 256
_LONGEST = 1 << 13
"""Symbols of the longest ending that is looked for ..."""
_DEEPEST = 1 << 10
"""... in the deep search, which takes time by its square."""


@dataclass(frozen=True, slots=True)
class _Compiled:
    """Matchers at their start, to be copied; the shortest way to the end that was found."""

    tokens: Any
    symbols: Any
    hints: tuple[bytes, ...]
    ending: tuple[int, ...]
    depth: int
    """Of the search that found ``ending``: 0 = going down once, 1 = trying every way."""


class Constrainer:
    """Safe to share between threads; compiling takes milliseconds, for huge schemas seconds."""

    def __init__(self, vocabulary: Vocabulary, model_vocab_size: int) -> None:
        if len(vocabulary) > model_vocab_size:
            raise NotSupportedError(
                f"vocabulary has {len(vocabulary)} ids, the model {model_vocab_size}: they do not "
                "belong together"
            )
        self._vocabulary = vocabulary
        self._book = Symbols(vocabulary, model_vocab_size)
        self._cache: OrderedDict[Constraint, _Compiled] = OrderedDict()
        self._lock = threading.Lock()

    def guide(self, request: StepRequest) -> Guide:
        """Of a request with a constraint. ConstraintError when it cannot be compiled or no text of
        it can be ended."""
        assert request.constraint is not None, "asked for without a constraint"
        eos_ids = self._vocabulary.eos_ids
        words = set(request.stop_ids) - self._vocabulary.special_ids - set(eos_ids)
        if words:
            raise ConstraintError(
                f"stop id {min(words)} is an ordinary token and would cut a constrained text; "
                "leave it out, the text ends by itself"
            )
        with self._lock:
            compiled = self._cache.get(request.constraint) or self._compile(request.constraint)
            if not compiled.depth and not self._fits(compiled, request.max_new_tokens):
                compiled = self._shortened(compiled)
            self._cache[request.constraint] = compiled
            self._cache.move_to_end(request.constraint)
            if len(self._cache) > _CACHE_SIZE:
                self._cache.popitem(last=False)
            tokens, symbols = compiled.tokens.deep_copy(), compiled.symbols.deep_copy()
        # the caller says which of them it reads as an end
        ends = tuple(end for end in eos_ids if end in request.stop_ids) or eos_ids
        return Guide(tokens, symbols, self._book, compiled.hints, ends, list(compiled.ending))

    def _compile(self, constraint: Constraint) -> _Compiled:
        import llguidance

        grammar = grammar_of(constraint, self._vocabulary)
        made = []
        for trie in (self._book.symbol_trie, self._book.token_trie):
            matcher = llguidance.LLMatcher(
                trie, llguidance.LLMatcher.grammar_from_lark(grammar.lark)
            )
            if matcher.is_error():
                raise ConstraintError(
                    f"constraint {constraint.kind}: {_first_line(matcher.get_error())}; change the "
                    "schema or grammar"
                )
            made.append(matcher)
        symbols, tokens = made
        compiled = _Compiled(tokens, symbols, grammar.hints, (), 0)
        compiled = self._searched(compiled, _LONGEST) or self._shortened(compiled)
        if not compiled.ending:
            raise ConstraintError(
                f"constraint {constraint.kind}: no complete text was found in {_LONGEST} bytes; "
                "the schema or grammar may have none"
            )
        return compiled

    def _searched(self, compiled: _Compiled, limit: int) -> _Compiled | None:
        """With an ending that the search of its depth finds, and that tokens can spell."""
        completer = Completer(compiled.symbols, compiled.hints)
        ending = completer.complete(limit, compiled.depth)
        if ending is None or self._book.tokens_of(ending, self._vocabulary.eos_ids[0]) is None:
            return None
        return replace(compiled, ending=tuple(ending))

    def _shortened(self, compiled: _Compiled) -> _Compiled:
        """With the better of its ending and that of a deep search."""
        deep = replace(compiled, depth=1)
        limit = len(compiled.ending) - 1 if compiled.ending else _DEEPEST
        return self._searched(deep, limit) or deep

    def _fits(self, compiled: _Compiled, num_tokens: int) -> bool:
        path = self._book.tokens_of(compiled.ending, self._vocabulary.eos_ids[0])
        return path is not None and len(path) <= num_tokens


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "cannot be compiled"
