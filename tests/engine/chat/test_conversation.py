"""Conversation: what the engine sees is the rendered dialogue, and answers come in whole text."""

import asyncio

import pytest

from engine.chat.chatml import ChatMLRenderer
from engine.chat.conversation import Conversation, Manner
from engine.chat.dialogue import Renderer
from engine.chat.kimi import K25Renderer
from engine.config import EngineConfig
from engine.errors import CapacityError
from engine.runtime.types import ContextPolicy, DrawKey, Sampling, StepRequest
from tests.engine.chat.dialogues import small_hf, small_kimi
from tests.engine.tiny import MODEL, make_engine

ENGINE = EngineConfig(max_context=300, num_blocks=32, max_contexts=4, deterministic=True)


def renderers() -> dict[str, Renderer]:
    return {"chatml": ChatMLRenderer(small_hf()), "k25": K25Renderer(small_kimi())}


def engine_for(renderer: Renderer):
    size = renderer.tokenizer.vocab_size
    model = MODEL.model_copy(update={"vocab_size": size, "max_position_embeddings": 512})
    return make_engine(ENGINE, model)


async def heard(conversation: Conversation, *texts: str) -> list[str]:
    return ["".join([piece async for piece in conversation.say(text)]) for text in texts]


@pytest.mark.parametrize("name", ["chatml", "k25"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_engine_sees_the_rendered_dialogue(name, temperature):
    """Each answer is what a fresh context samples after the same ids."""
    renderer = renderers()[name]
    manner = Manner(system="S", max_new_tokens=20, temperature=temperature, seed=3, step_tokens=7)

    async def check(engine) -> None:
        answers = await heard(Conversation(engine, renderer, manner), "a", "b")
        assert answers[0]
        ids = renderer.prompt("S", "a")
        for answer in answers:
            ctx = await engine.init_context(ids, ContextPolicy(draw=DrawKey(3)))
            sampling = Sampling(temperature=temperature)
            result = await engine.forward_step(StepRequest(ctx, 20, sampling, renderer.stop_ids))
            await engine.release(ctx)
            sampled = result.token_ids.tolist()
            said = sampled[:-1] if result.finish == "stop" else sampled
            assert renderer.tokenizer.decode(said) == answer
            end = [] if sampled[-1] == renderer.end_id else [renderer.end_id]
            ids = ids + sampled + end + renderer.next_prompt("b")

    engine = engine_for(renderer)
    try:
        asyncio.run(check(engine))
    finally:
        engine.close()


@pytest.mark.parametrize("name", ["chatml", "k25"])
def test_a_reply_is_the_same_as_a_rendered_message(name):
    """next_prompt continues a dialogue exactly as render would."""
    from engine.chat.base import Message

    renderer = renderers()[name]
    messages = [Message("user", "a"), Message("assistant", "b"), Message("user", "c")]
    expected = renderer.render(messages) + renderer.generation_header()
    assert renderer.render(messages[:2]) + renderer.next_prompt("c") == expected
    assert renderer.stop_ids[0] == renderer.end_id
    assert len(set(renderer.stop_ids)) == 2


def test_a_closed_conversation_begins_anew():
    """The context is given back, the next answer knows nothing of the last."""
    renderer = renderers()["chatml"]

    async def check(engine) -> None:
        conversation = Conversation(engine, renderer, Manner(max_new_tokens=10))
        first = await heard(conversation, "a")
        await conversation.close()
        assert (await engine.info()).num_contexts == 0
        assert await heard(conversation, "a") == first

    engine = engine_for(renderer)
    try:
        asyncio.run(check(engine))
    finally:
        engine.close()


def test_a_dialogue_that_does_not_fit():
    """Is refused by the engine, in its words."""
    renderer = renderers()["chatml"]
    engine = engine_for(renderer)
    try:
        with pytest.raises(CapacityError):
            asyncio.run(heard(Conversation(engine, renderer, Manner()), "a" * 500))
    finally:
        engine.close()
