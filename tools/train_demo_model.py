"""Train the demo model: a small Llama trained on the Python standard library.

It takes the sources of the running Python, holds some files out, trains a byte-level BPE tokenizer
and the model on the rest, and writes a Hugging Face folder with a model card. The figures in the
card are measured on that folder, loaded again from disk. The constants below and the seed are the
whole recipe: the same Python, torch and kind of CPU give the same weights.
"""

import argparse
import hashlib
import math
import shutil
import signal
import string
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn import functional
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

SEED = 20
VOCAB_SIZE = 2048
CONTEXT = 1024
BATCH = 8
STEPS = 1500
WARM_UP = 60
PEAK_LR = 3e-3
FINAL_LR = 1e-4
WEIGHT_DECAY = 0.1
THREADS = 2

BOS, EOS = "<|begin|>", "<|end|>"
# Line breaks and the whole indentation are separate tokens, so that a prompt that ends after either
# is tokenized as in training.
PIECES = r"\n+|(?<=\n)[ \t]+|[ _.]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|[ \t]+(?!\S)|\s"
# The messages are joined into one file.
CHAT_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"

SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "encodings", "pydoc_data"}
HELD_OUT_OF_256 = 12

PROMPTS = ("def __init__(self", "import os\n", "for i in range(", "class Error(Exception):\n")
ROOT = Path(__file__).resolve().parent.parent
CARD_TEMPLATE = Path(__file__).with_name("demo_model_card.md")


@dataclass(frozen=True, slots=True)
class Corpus:
    """Sources of the library by path, split into training set and held-out set."""

    train: dict[str, str]
    held_out: dict[str, str]
    digest: str  # of all paths and texts, in order


@dataclass(frozen=True, slots=True)
class Loss:
    """Mean negative log likelihood over the held-out files."""

    nats_per_token: float
    bits_per_byte: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class TrainingState:
    """Progress of training: steps and time, including earlier runs that were resumed."""

    steps: int = 0
    duration_s: float = 0.0


def main() -> int:
    args = parse_args()
    torch.set_num_threads(THREADS)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(SEED)
    transformers_logging.disable_progress_bar()
    corpus = read_corpus(Path(sysconfig.get_path("stdlib")))
    tokenizer = train_tokenizer(corpus)
    train_ids = encode(tokenizer, corpus.train)
    model = LlamaForCausalLM(model_config(tokenizer))
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"{len(corpus.train)} files, {len(train_ids):,} tokens to train on, "
        f"{len(corpus.held_out)} files held out; {num_parameters:,} parameters",
        flush=True,
    )
    spent = train(model, train_ids, line_starts(tokenizer, train_ids), args)
    if spent.steps < STEPS:
        print(f"stopped after step {spent.steps}; continue with --resume", file=sys.stderr)
        return 130
    export(model, tokenizer, args.out)
    loss = loss_of_folder(args.out, corpus)
    write_card(args.out, corpus, len(train_ids), loss, spent)
    print(f"{args.out}: held-out loss {loss.nats_per_token:.4f} nats per token")
    return 0


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=ROOT / "models" / "demo", help="folder to write (%(default)s)"
    )
    parser.add_argument(
        "--checkpoint",
        type=Path,
        default=ROOT / "build" / "demo_model.pt",
        help="checkpoint of a stopped run (%(default)s)",
    )
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint")
    parser.add_argument(
        "--stop-after", type=int, default=STEPS, metavar="N", help="stop early, after step N"
    )
    return parser.parse_args()


def read_corpus(library: Path) -> Corpus:
    train: dict[str, str] = {}
    held_out: dict[str, str] = {}
    digest = hashlib.sha256()
    for path in sorted(library.rglob("*.py")):
        name = path.relative_to(library).as_posix()
        if SKIPPED_FOLDERS & set(name.split("/")) or name.startswith("_sysconfigdata"):
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        digest.update(f"{name}\0{text}\0".encode())
        # The split depends on the path alone, so it is stable when other files change.
        side = held_out if hashlib.sha256(name.encode()).digest()[0] < HELD_OUT_OF_256 else train
        side[name] = text
    return Corpus(train, held_out, digest.hexdigest())


def train_tokenizer(corpus: Corpus) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus.train.values(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def encode(tokenizer: Tokenizer, files: dict[str, str]) -> torch.Tensor:
    """Encode all files as one sequence of ids, each file between its begin and end tokens."""
    eos = tokenizer.token_to_id(EOS)
    encoded = tokenizer.encode_batch(list(files.values()))
    return torch.tensor([token for one in encoded for token in (*one.ids, eos)])


def line_starts(tokenizer: Tokenizer, ids: torch.Tensor) -> torch.Tensor:
    """Return the positions of line starts that are followed by a whole window."""
    size = tokenizer.get_vocab_size()
    ends_line = torch.tensor([tokenizer.decode([token]).endswith("\n") for token in range(size)])
    starts = torch.nonzero(ends_line[ids]).squeeze(1) + 1
    return starts[starts < len(ids) - CONTEXT]


def model_config(tokenizer: Tokenizer) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.token_to_id(BOS),
        eos_token_id=tokenizer.token_to_id(EOS),
        pad_token_id=None,
    )


def train(
    model: LlamaForCausalLM, ids: torch.Tensor, starts: torch.Tensor, args: argparse.Namespace
) -> TrainingState:
    """Train to the last step, or to the one that Ctrl-C interrupts."""
    optimizer = make_optimizer(model)
    before = load_checkpoint(args.checkpoint, model, optimizer) if args.resume else TrainingState()
    step, started = before.steps, time.monotonic()
    progress = ProgressPrinter(step)
    interrupted = interrupt_flag()
    model.train()
    while step < min(STEPS, args.stop_after) and not interrupted:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        loss = train_step(model, optimizer, batch_of_step(step, ids, starts, model.config))
        step += 1
        progress.report(step, loss)
    spent = TrainingState(step, before.duration_s + time.monotonic() - started)
    save_checkpoint(args.checkpoint, model, optimizer, spent)
    return spent


def make_optimizer(model: LlamaForCausalLM) -> torch.optim.AdamW:
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    norms = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": WEIGHT_DECAY},
        {"params": norms, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=PEAK_LR, betas=(0.9, 0.95))


def interrupt_flag() -> list[int]:
    """Return a list that is empty until the first Ctrl-C; a second one ends the process."""
    seen: list[int] = []

    def note(number: int, _frame: object) -> None:
        seen.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, note)
    return seen


def learning_rate(step: int) -> float:
    if step < WARM_UP:
        return PEAK_LR * (step + 1) / WARM_UP
    part_done = (step - WARM_UP) / (STEPS - WARM_UP)
    return FINAL_LR + (PEAK_LR - FINAL_LR) * 0.5 * (1 + math.cos(math.pi * part_done))


def batch_of_step(
    step: int, ids: torch.Tensor, starts: torch.Tensor, config: LlamaConfig
) -> torch.Tensor:
    """Return excerpts [BATCH, CONTEXT + 1], each after a begin token, like prompts.

    Seeded by the step, so that a resumed run gets the batches of an uninterrupted one.
    """
    random = torch.Generator().manual_seed(SEED * 1_000_003 + step)
    chosen = starts[torch.randint(len(starts), (BATCH, 1), generator=random)]
    excerpts = ids[chosen + torch.arange(CONTEXT)]
    return functional.pad(excerpts, (1, 0), value=config.bos_token_id)


def train_step(
    model: LlamaForCausalLM, optimizer: torch.optim.AdamW, tokens: torch.Tensor
) -> float:
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens[:, :-1], use_cache=False).logits
    loss = functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


class ProgressPrinter:
    """Prints loss, speed and remaining time every `EVERY` steps."""

    EVERY = 20

    def __init__(self, first_step: int) -> None:
        self._first_step = first_step
        self._started = time.monotonic()
        self._losses: list[float] = []

    def report(self, step: int, loss: float) -> None:
        self._losses.append(loss)
        if step % self.EVERY:
            return
        step_s = (time.monotonic() - self._started) / (step - self._first_step)
        mean = sum(self._losses) / len(self._losses)
        self._losses.clear()
        print(
            f"step {step}/{STEPS}  loss {mean:.4f}  {BATCH * CONTEXT / step_s:,.0f} tokens/s  "
            f"{step_s * (STEPS - step) / 60:.1f} min left",
            flush=True,
        )


def save_checkpoint(
    path: Path, model: LlamaForCausalLM, optimizer: torch.optim.AdamW, spent: TrainingState
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {
        "spent": asdict(spent),
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    torch.save(state, path)


def load_checkpoint(
    path: Path, model: LlamaForCausalLM, optimizer: torch.optim.AdamW
) -> TrainingState:
    state = torch.load(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return TrainingState(**state["spent"])


def export(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        eos_token_id=model.config.eos_token_id,
        do_sample=True,
        temperature=0.7,
    )
    model.bfloat16().save_pretrained(folder)
    (folder / "model.safetensors").chmod(
        0o644
    )  # save_pretrained makes it readable by its owner only
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder, save_jinja_files=False)


@torch.inference_mode()
def loss_of_folder(folder: Path, corpus: Corpus) -> Loss:
    """Return the loss of the exported model on the held-out tokens, in windows as in training."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    ids = encode(Tokenizer.from_file(str(folder / "tokenizer.json")), corpus.held_out)
    total = 0.0
    for window in ids.split(CONTEXT):
        tokens = functional.pad(window, (1, 0), value=model.config.bos_token_id).unsqueeze(0)
        logits = model(tokens[:, :-1], use_cache=False).logits.float()
        total += functional.cross_entropy(logits[0], tokens[0, 1:], reduction="sum").item()
    num_bytes = sum(len(text.encode()) for text in corpus.held_out.values())
    return Loss(total / len(ids), total / math.log(2) / num_bytes, len(ids))


def write_card(
    folder: Path, corpus: Corpus, num_train_tokens: int, loss: Loss, spent: TrainingState
) -> None:
    """Write the model card with the figures measured by this run."""
    shutil.copy(Path(sysconfig.get_path("stdlib")) / "LICENSE.txt", folder / "LICENSE-PYTHON.txt")
    weights = folder / "model.safetensors"
    card = string.Template(CARD_TEMPLATE.read_text(encoding="utf-8")).substitute(
        python=sys.version.split()[0],
        torch=torch.__version__,
        isa=torch.backends.cpu.get_cpu_capability(),
        seed=SEED,
        steps=STEPS,
        batch=BATCH,
        context=CONTEXT,
        vocab_size=VOCAB_SIZE,
        num_files=len(corpus.train),
        num_train_tokens=f"{num_train_tokens:,}",
        epochs=f"{STEPS * BATCH * CONTEXT / num_train_tokens:.1f}",
        num_held_out_files=len(corpus.held_out),
        num_held_out_tokens=f"{loss.num_tokens:,}",
        corpus_digest=corpus.digest,
        loss=f"{loss.nats_per_token:.4f}",
        perplexity=f"{math.exp(loss.nats_per_token):.2f}",
        bits_per_byte=f"{loss.bits_per_byte:.4f}",
        minutes=f"{spent.duration_s / 60:.0f}",
        size_mb=f"{weights.stat().st_size / 1e6:.1f}",
        weights_digest=hashlib.sha256(weights.read_bytes()).hexdigest(),
        samples="\n\n".join(samples(folder)),
    )
    (folder / "README.md").write_text(card, encoding="utf-8")


def samples(folder: Path) -> Iterator[str]:
    """Yield samples of the model as Markdown: each prompt greedily and at temperature 0.7."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    for prompt in PROMPTS:
        for title, options in (
            ("greedy", {"do_sample": False, "temperature": None}),
            ("temperature 0.7", {"do_sample": True, "temperature": 0.7, "top_k": 0}),
        ):
            torch.manual_seed(SEED)
            inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
            output = model.generate(**inputs, max_new_tokens=80, **options)
            text = tokenizer.decode(output[0], skip_special_tokens=True)
            yield f"`{prompt!r}`, {title}:\n\n```python\n{text.rstrip()}\n```"


if __name__ == "__main__":
    sys.exit(main())
