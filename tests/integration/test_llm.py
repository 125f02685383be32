"""`baton.LLM` and `baton run`: the engine in Python and from the command line."""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
import threading
from pathlib import Path

import pytest

import baton
from baton import LLM, SamplingParams
from baton.core.errors import InvalidRequest, ModelError
from baton.core.output import FinishReason
from baton.engine.errors import EngineStopped
from tests.support.baton_command import run_baton
from tests.support.families import STATE_VARIANTS
from tests.support.models import VOCAB_SIZE, make_model_folder, prompt_of, reference_choices

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


def test_greedy_answers_equal_those_of_transformers(local: LLM, model_folder: Path) -> None:
    prompts = [prompt_of(length) for length in (1, 15, 16, 17, 60)]

    answers = local.generate(prompts, GREEDY)

    for prompt, answer in zip(prompts, answers, strict=True):
        choices = reference_choices(model_folder, prompt, answer.token_ids, 24)
        assert answer.token_ids == choices
    assert {answer.finish_reason for answer in answers} == {FinishReason.LENGTH}
    local.engine.scheduler.check()


def test_generate_accepts_and_returns_text(local: LLM) -> None:
    [answer] = local.generate("the quick brown fox", GREEDY)

    assert answer.prompt_token_ids == local.tokenizer.encode("the quick brown fox")
    assert answer.text == local.tokenizer.decode(answer.token_ids)


def test_texts_are_given_while_they_are_generated(local: LLM) -> None:
    pieces: dict[int, list[str]] = {0: [], 1: []}
    has_ended: list[bool] = []

    def take(index: int, text: str) -> None:
        pieces[index].append(text)
        has_ended.append(not local.engine.scheduler.has_work)

    answers = local.generate(["the fox", "jumps over"], GREEDY, on_text=take)

    assert ["".join(each) for each in pieces.values()] == [answer.text for answer in answers]
    assert not all(has_ended)


def test_chats_are_answered_as_the_template_renders_them(local: LLM) -> None:
    chats = [[{"role": "user", "content": text}] for text in ("the fox", "jumps")]
    rendered = [local.tokenizer.render_chat(chat) for chat in chats]
    prompts = [local.tokenizer.encode(text, add_special_tokens=False) for text in rendered]

    answers = local.chat(chats, GREEDY)

    assert [answer.prompt_token_ids for answer in answers] == prompts
    assert [answer.text for answer in answers] == [
        answer.text for answer in local.generate(prompts, GREEDY)
    ]
    assert local.chat(chats[0], GREEDY)[0].text == answers[0].text
    with pytest.raises(InvalidRequest, match=r"chat 1: .*wizard"):
        local.chat([chats[0], [{"role": "wizard", "content": "the fox"}]])


def test_processed_logprobs_are_those_of_the_sampling_settings(
    local: LLM, model_folder: Path
) -> None:
    allowed = SamplingParams(max_tokens=2, temperature=0.5, allowed_token_ids=(5, 6), logprobs=2)
    prompt = prompt_of(20)

    [raw] = local.generate([prompt], allowed)
    with LLM(str(model_folder), logprobs_mode="processed_logprobs", dtype="float32") as processed:
        [answer] = processed.generate([prompt], allowed)

    for entry in answer.logprobs:
        assert {token_id for token_id, _ in entry.top} == {5, 6}
        assert sum(math.exp(logprob) for _, logprob in entry.top) == pytest.approx(1, abs=1e-5)
    assert all(sum(math.exp(value) for _, value in entry.top) < 0.9 for entry in raw.logprobs)


def test_an_answer_ends_at_a_stop_string_and_others_continue(local: LLM) -> None:
    prompts = ["the quick brown fox", "über"]
    whole = local.generate(prompts, GREEDY)
    stop = whole[0].text[5:8]
    assert stop not in whole[1].text

    cut, other = local.generate(prompts, GREEDY, stop=[stop, "no such text"])
    [with_stop] = local.generate(prompts[0], GREEDY, stop=stop, include_stop_in_output=True)

    end = whole[0].text.index(stop)
    assert (cut.text, cut.stop_string) == (whole[0].text[:end], stop)
    assert cut.finish_reason is FinishReason.STOP
    assert cut.token_ids == whole[0].token_ids[: len(cut.token_ids)] != whole[0].token_ids
    assert with_stop.text == whole[0].text[:end] + stop
    assert (other.text, other.finish_reason) == (whole[1].text, FinishReason.LENGTH)
    assert not local.engine.scheduler.has_work
    local.engine.scheduler.check()


def test_a_repeated_prompt_reports_its_cached_tokens_with_every_finish_reason(local: LLM) -> None:
    [whole] = local.generate("a prompt that nobody else has in this file", GREEDY)

    [again] = local.generate("a prompt that nobody else has in this file", GREEDY)
    [cut] = local.generate(
        "a prompt that nobody else has in this file", GREEDY, stop=whole.text[3:5]
    )

    num_shared = (len(whole.prompt_token_ids) - 1) // 16 * 16
    assert num_shared > 0
    assert (whole.num_cached_tokens, again.num_cached_tokens) == (0, num_shared)
    assert (cut.stop_string, cut.num_cached_tokens) == (whole.text[3:5], num_shared)


def test_stop_strings_are_ignored_before_min_tokens(local: LLM) -> None:
    [whole] = local.generate("the quick brown fox", GREEDY)
    patient = SamplingParams(max_tokens=24, min_tokens=24, temperature=0.0, ignore_eos=True)

    [answer] = local.generate("the quick brown fox", patient, stop=whole.text[5:8])

    assert (answer.text, answer.token_ids) == (whole.text, whole.token_ids)


def test_a_list_of_numbers_is_one_prompt(local: LLM) -> None:
    answers = local.generate([5, 6, 7], GREEDY)

    assert [answer.prompt_token_ids for answer in answers] == [[5, 6, 7]]


def test_each_prompt_can_have_its_own_sampling_params(local: LLM) -> None:
    params = [SamplingParams(max_tokens=n, seed=1, ignore_eos=True) for n in (1, 5, 9)]

    answers = local.generate([prompt_of(4)] * 3, params)

    assert [len(answer.token_ids) for answer in answers] == [1, 5, 9]
    assert answers[2].token_ids[:5] == answers[1].token_ids


def test_logprobs_are_returned_if_requested(local: LLM) -> None:
    params = SamplingParams(max_tokens=3, temperature=0.0, logprobs=2, prompt_logprobs=0)

    [answer] = local.generate([prompt_of(20)], params)

    assert len(answer.logprobs) == len(answer.token_ids)
    assert all(len(one.top) == 2 and one.rank == 1 for one in answer.logprobs)
    assert len(answer.prompt_logprobs) == 20
    assert answer.prompt_logprobs[0] is None


@pytest.mark.parametrize(
    ("prompt", "complaint"),
    [
        ([], "empty"),
        ([VOCAB_SIZE], "vocabulary"),
        ([5] * 10_000, "10000"),
    ],
)
def test_an_unservable_prompt_is_named_and_the_engine_keeps_running(
    local: LLM, prompt: list[int], complaint: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"prompt 1: .*{complaint}"):
        local.generate([prompt_of(3), prompt], GREEDY)

    assert len(local.generate([prompt_of(3)], GREEDY)[0].token_ids) == 24
    local.engine.scheduler.check()


def test_max_tokens_beyond_the_context_are_lowered_with_a_warning(local: LLM) -> None:
    beyond, within = local.generate(
        [prompt_of(9), prompt_of(8)],
        [SamplingParams(max_tokens=10**6, temperature=0.0, ignore_eos=True), GREEDY],
    )

    num_tokens = len(beyond.token_ids)
    [warning] = beyond.warnings
    assert warning.startswith(f"max_tokens 1000000 was lowered to {num_tokens}: ")
    assert f"can have {num_tokens + 9} tokens together, and the prompt has 9" in warning
    assert within.warnings == []
    local.engine.scheduler.check()


def test_too_few_params_for_the_prompts_are_refused(local: LLM) -> None:
    with pytest.raises(InvalidRequest, match="2 prompts, but 1"):
        local.generate([prompt_of(3), prompt_of(4)], [GREEDY])


def test_ctrl_c_leaves_the_engine_ready_for_the_next_call(local: LLM) -> None:
    with pytest.raises(KeyboardInterrupt):
        _generate_until_interrupted(local)

    assert not local.engine.scheduler.has_work
    local.engine.scheduler.check()
    assert len(local.generate([prompt_of(3)], GREEDY)[0].token_ids) == 24


def test_unknown_names_of_the_package_raise_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'LLMM'"):
        baton.LLMM  # noqa: B018


def test_a_missing_folder_is_named() -> None:
    with pytest.raises(ModelError, match="no-such-folder"):
        LLM("/no-such-folder/model")


def test_run_prints_the_answer_and_the_kv_cache_size(model_folder: Path) -> None:
    done = _baton("run", "--model", str(model_folder), "--max-tokens", "4", "the fox")

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("the fox")
    assert "blocks" in done.stderr
    assert "warning" not in done.stderr


def test_run_prints_only_the_answers_of_chats(local: LLM, model_folder: Path) -> None:
    [answer] = local.chat([{"role": "user", "content": "the fox"}], GREEDY)
    sampling = ("--temperature", "0", "--max-tokens", "24", "--ignore-eos", "--dtype", "float32")

    done = _baton("run", "--chat", "the fox", "--model", str(model_folder), *sampling)

    assert done.stdout == f"{answer.text}\n", done.stderr


def test_run_names_chats_where_a_model_has_nothing_to_add(local: LLM, model_folder: Path) -> None:
    [answer] = local.generate("the fox", GREEDY)
    greedy = ("--temperature", "0", "--dtype", "float32", "--stop", answer.text[0])

    done = _baton("run", "the fox", "--model", str(model_folder), *greedy)

    assert done.stdout == "the fox\n"
    assert "add --chat" in done.stderr


def test_run_prints_that_max_tokens_was_lowered(model_folder: Path) -> None:
    done = _baton("run", "--model", str(model_folder), "--max-tokens", "9999", "the fox")

    assert done.returncode == 0, done.stderr
    assert "baton: warning: max_tokens 9999 was lowered to " in done.stderr


def test_run_plans_the_kv_that_its_prompts_need(model_folder: Path) -> None:
    sampling = ("--max-tokens", "24", "--ignore-eos", "--temperature", "0")
    arguments = ("run", "the quick brown fox", "über", "--model", str(model_folder), *sampling)
    large = run_baton(*arguments, "--kv-cache-memory", "4MiB")

    planned = run_baton(*arguments)

    assert planned.stdout == large.stdout
    # Two requests of up to 48 tokens.
    assert ", 6 blocks, 96 tokens" in planned.stderr


def test_run_refuses_a_prompt_beyond_the_context_of_the_model(model_folder: Path) -> None:
    done = run_baton("run", "fox " * 2000, "--model", str(model_folder))

    assert "maximum context length is 512 tokens" in done.stderr


def test_one_request_of_a_model_with_a_recurrent_state_fits_into_its_planned_kv(
    tmp_path: Path,
) -> None:
    """It needs two sides of the state, and a snapshot to begin from."""
    folder = make_model_folder(tmp_path, STATE_VARIANTS["qwen3.5"])
    with LLM(str(folder), kernels="torch", max_num_seqs=1, max_model_len=80) as llm:
        [answer] = llm.generate([prompt_of(56)], GREEDY)

    assert len(answer.token_ids) == 24


def test_the_tokenizer_is_checked_before_the_weights_are_read(
    model_folder: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(model_folder, tmp_path / "model"))
    (folder / "model.safetensors").write_bytes(b"")
    (folder / "tokenizer.json").write_text("{")

    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        LLM(str(folder))


def test_run_names_an_invalid_setting_in_one_line(model_folder: Path) -> None:
    done = _baton("run", "--model", str(model_folder), "--temperature", "-1", "the fox")

    assert done.returncode == 2
    assert done.stderr == "baton: error: temperature is -1.0; it must be from 0 to 100\n"


def _generate_until_interrupted(local: LLM) -> None:
    """Generate until a second thread sends SIGINT, between two steps or during one."""
    endless = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
    press = threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGINT))
    press.start()
    while True:
        local.generate([prompt_of(length) for length in range(1, 9)], endless)


def _baton(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_baton(*arguments, "--kv-cache-memory", "4MiB")


def test_the_caller_gets_the_exception_that_ended_the_engine(model_folder: Path) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    with LLM(str(model_folder), kv_cache_memory="4MiB") as llm:
        llm.engine.scheduler.update = broken  # type: ignore[method-assign, assignment]

        with pytest.raises(ZeroDivisionError, match="a bug"):
            llm.generate([(1, 2, 3)], GREEDY)
        with pytest.raises(EngineStopped, match="a bug"):
            llm.generate([(1, 2, 3)], GREEDY)
