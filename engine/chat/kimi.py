"""The layouts of the released Kimi models: K2Renderer and K25Renderer (facts/kimi-facts.md 1.4).

What they add to KimiRenderer: the default system text, declarations with sorted keys (K2: compact
JSON, K2.5: TypeScript), named tool results, and where reasoning stands. Reasoning stays in the
history, as with the template's ``preserve_thinking``; a template that drops it equals
``render(drop_reasoning(messages))``. Ids of calls are the model's own and are never rewritten; for
dialogues of other systems see ``number_calls``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import structlog

from engine.chat.base import Tokenizer, ToolDeclaration
from engine.chat.renderer import KimiRenderer
from engine.chat.typescript import UntypedSchemaError, declare_in_typescript

DEFAULT_SYSTEM = "You are Kimi, an AI assistant created by Moonshot AI."
log = structlog.get_logger(__name__)


class K2Renderer(KimiRenderer):
    """Kimi K2: Instruct, or Thinking, whose turns open and close their <think> block themselves."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        thinking: bool = False,
        default_system: str | None = DEFAULT_SYSTEM,
    ) -> None:
        super().__init__(tokenizer)
        self.think = "turn_opens" if thinking else "never"
        self.default_system = default_system

    def _declared(self, tools: Sequence[ToolDeclaration]) -> str:
        return _sorted_json(tools)


class K25Renderer(KimiRenderer):
    """Kimi K2.5 and K2.6: the header opens the <think> block (thinking) or closes it too (instant).

    Tools whose schema has no TypeScript form are declared as JSON, all of them, as the released
    template does; a warning says why.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        thinking: bool = True,
        default_system: str | None = DEFAULT_SYSTEM,
    ) -> None:
        super().__init__(tokenizer)
        self.think = "header_opens" if thinking else "header_closes"
        self.default_system = default_system

    def _declared(self, tools: Sequence[ToolDeclaration]) -> str:
        try:
            return declare_in_typescript(tools)
        except UntypedSchemaError as error:
            log.warning("tools are declared as JSON, not TypeScript", reason=str(error))
            return _sorted_json(tools)


def _sorted_json(tools: Sequence[ToolDeclaration]) -> str:
    entries = [{"type": "function", "function": _function(tool)} for tool in tools]
    return json.dumps(entries, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def _function(tool: ToolDeclaration) -> Mapping[str, Any]:
    described = {"description": tool.description} if tool.description else {}
    return {"name": tool.name, **described, "parameters": tool.parameters}
