"""Train an EAGLE-3 draft head for a Llama-like target on CPU cores, and measure it.

The head learns the target's own distribution of the next tokens, several drafts ahead at once, on
excerpts of the Python standard library and on texts that the target writes on Baton's engine, which
are chats if it has a chat template. The tool writes a folder in the format of published heads, with
a model card. The card's figures are those of Baton's engine with this folder.

    python -m tools.train_draft_head            # for models/demo
    python -m tools.train_draft_head --target SmolLM2-135M-Instruct.Q4_1.gguf --out HEAD \\
        --intermediate-size 0 --draft-vocab-size 8192 --library-share 0.1 --window 512 \\
        --num-windows 2000 --batch 4 --num-steps 1000 --threads 2
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import math
import string
import sys
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.progress import Progress, TextColumn
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.utils import logging as transformers_logging

from baton import LLM, SamplingParams
from tools.draft_head import TAP_IDS, DraftHead, head_config, load_head, save_head
from tools.draft_texts import USER_TEMPERATURE, Library, Writer, Writing
from tools.train_demo_model import interrupt_flag

SEED = 59
UNROLLED = 3  # draft steps in training
STEP_WEIGHT = 0.8  # of the loss of a draft step, relative to the one before
WARM_UP = 40
FINAL_LR_SHARE = 0.02
WEIGHT_DECAY = 0.05
STEPS_PER_CHECKPOINT = 100

PROMPT = 32  # tokens of an excerpt that the target continues
TEMPERATURES = (0.0, 0.7, 0.8, 1.0)  # of the texts that it writes
NUM_MEASURED = 64  # texts of each kind
MEASURED_PROMPT, MEASURED_TOKENS = 64, 128
MAX_MEASURED_PROMPT = 128  # of a chat
MEASURED_DRAFTS = 4
MEASURED_AT_ONCE = 3  # as many as get drafts in a step
MEASURED_TEMPERATURES = (0.0, 0.8)

ROOT = Path(__file__).resolve().parent.parent
CARD_TEMPLATE = Path(__file__).with_name("draft_head_card.md")


@dataclass(frozen=True, slots=True)
class Recipe:
    """Settings of a head and of its training, besides the target and the constants above."""

    draft_vocab_size: int = 0  # tokens that can be drafted, the most frequent ones; 0: all
    intermediate_size: int = 384  # of the feed-forward network; 0: the target's
    num_windows: int = 3000  # texts to learn from
    window: int = 256  # tokens of a text
    library_share: float = 0.5  # of the texts: excerpts of the library, not written by the target
    batch: int = 16  # texts of a step
    num_steps: int = 900
    peak_lr: float = 3e-3
    output_lr_share: float = 1.0  # of the output layer, which begins with rows of the target's


@dataclass(frozen=True, slots=True)
class TrainingState:
    """Progress of training: steps and time, including earlier runs that were resumed."""

    steps: int = 0
    duration_s: float = 0.0


def main() -> int:
    args = parse_args()
    recipe = Recipe(**{each.name: getattr(args, each.name) for each in fields(Recipe)})
    torch.set_num_threads(args.threads)
    torch.manual_seed(SEED)
    transformers_logging.disable_progress_bar()
    tokenizer = load_tokenizer(args.target)
    texts = stored_texts(tokenizer, recipe, args)
    target = Target.load(args.target)
    head = make_head(target, texts, recipe)
    print_sizes(target, head)
    spent = train(head, target, texts, recipe, args)
    if spent.steps < recipe.num_steps:
        print(f"stopped after step {spent.steps}; continue with --resume", file=sys.stderr)
        return 130
    save_head(head, args.out)
    write_card(args, recipe, spent)
    return 0


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default, text in (
        ("--target", ROOT / "models" / "demo", "folder or GGUF file of the model to draft for"),
        ("--out", ROOT / "models" / "demo-eagle3", "folder to write"),
        ("--work", ROOT / "build" / "draft_head", "folder for texts and the checkpoint"),
    ):
        parser.add_argument(name, type=Path, default=default, help=f"{text} (%(default)s)")
    for each in fields(Recipe):
        option = f"--{each.name.replace('_', '-')}"
        parser.add_argument(option, type=type(each.default), default=each.default)
    parser.add_argument("--threads", type=int, default=1, help="of torch (%(default)s)")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue with the texts and the checkpoint, perhaps to other --num-steps",
    )
    return parser.parse_args()


def load_tokenizer(path: Path) -> Any:
    return AutoTokenizer.from_pretrained(**pretrained(path))


def pretrained(path: Path) -> dict[str, Any]:
    """Return arguments by which transformers loads a folder or a GGUF file."""
    if path.is_dir():
        return {"pretrained_model_name_or_path": path}
    return {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}


class Target:
    """The model to draft for."""

    def __init__(self, model: Any) -> None:
        self.model = model.eval().requires_grad_(False)
        self.config = model.config
        self.tap_ids: list[int] = getattr(head_config(self.config), TAP_IDS)

    @classmethod
    def load(cls, path: Path) -> Target:
        names = pretrained(path)
        if "gguf_file" in names:  # whose weights would stay packed, which is slow
            names["quantization_config"] = GgufConfig(dequantize=True)
        return cls(AutoModelForCausalLM.from_pretrained(**names, dtype=torch.bfloat16))

    @property
    def embeddings(self) -> Tensor:
        weight: Tensor = self.model.get_input_embeddings().weight
        return weight

    @property
    def output_rows(self) -> Tensor:
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight

    @torch.no_grad()
    def read(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return hidden states at the taps, side by side, and those before the output layer."""
        found = self.model.model(input_ids=token_ids, output_hidden_states=True, use_cache=False)
        taps = torch.cat([found.hidden_states[each] for each in self.tap_ids], dim=-1)
        return taps, found.last_hidden_state


def stored_texts(tokenizer: Any, recipe: Recipe, args: argparse.Namespace) -> Tensor:
    """Return the texts to learn from, [texts, window], of this run or of the one to resume."""
    path: Path = args.work / "texts.pt"
    if args.resume:
        stored: Tensor = torch.load(path)
        return stored.long()
    with Writer.open(args.target, tokenizer, args.threads) as writer:
        texts = make_texts(writer, tokenizer, recipe)
    args.work.mkdir(parents=True, exist_ok=True)
    torch.save(texts.int(), path)
    return texts


def make_texts(writer: Writer, tokenizer: Any, recipe: Recipe) -> Tensor:
    library, counts = Library(tokenizer, is_held_out=False), count_texts(recipe)
    excerpts = library.excerpts(counts.excerpts, recipe.window, SEED)
    begun = library.excerpts(counts.continued, PROMPT, SEED + 1)
    temperatures = itertools.cycle(TEMPERATURES)
    beginnings = [Writing(each, next(temperatures)) for each in begun]
    beginnings += [writer.begin(next(temperatures)) for _ in range(counts.own)]
    written = writer.texts(beginnings, recipe.window, SEED + 2)
    return torch.cat([torch.tensor(excerpts, dtype=torch.int64).view(-1, recipe.window), written])


class TextCounts(NamedTuple):
    """Numbers of texts to learn from, by kind."""

    excerpts: int  # of the library
    continued: int  # begun with an excerpt
    own: int  # of the target alone


def count_texts(recipe: Recipe) -> TextCounts:
    num_excerpts = round(recipe.num_windows * recipe.library_share)
    num_written = recipe.num_windows - num_excerpts
    num_continued = round(num_written * recipe.library_share)
    return TextCounts(num_excerpts, num_continued, num_written - num_continued)


def make_head(target: Target, texts: Tensor, recipe: Recipe) -> DraftHead:
    config = head_config(
        target.config,
        draft_vocab_size=recipe.draft_vocab_size,
        intermediate_size=recipe.intermediate_size,
    )
    counts = torch.bincount(texts.flatten(), minlength=config.vocab_size)
    drafted = counts.argsort(descending=True, stable=True)[: config.draft_vocab_size].sort().values
    share = counts[drafted].sum() / counts.sum()
    print(f"{len(texts):,} texts, {share:.2%} of their tokens in the draft vocabulary", flush=True)
    head = DraftHead(config, drafted)
    with torch.no_grad():
        head.lm_head.weight.copy_(target.output_rows[drafted])
        head.norm.weight.copy_(target.model.model.norm.weight)
    return head


def print_sizes(target: Target, head: DraftHead) -> None:
    num_target, num_head, num_step = count_parameters(target, head)
    print(
        f"target: {target.config.num_hidden_layers} layers, {num_target:,} parameters; "
        f"head: 1 layer, {num_head:,}, {num_step:,} of a draft step after the first",
        flush=True,
    )


def count_parameters(target: Target, head: DraftHead) -> tuple[int, int, int]:
    """Return parameters that are multiplied with for a token: target's, first draft's, later's."""
    num_target = sum(each.numel() for each in target.model.model.layers.parameters())
    num_head = sum(each.numel() for each in head.parameters())
    return num_target + target.output_rows.numel(), num_head, num_head - head.fc.weight.numel()


class StoredStates:
    """Hidden states of texts, computed at first use and stored in a file.

    With `resumes`, those that an earlier run has stored are used.
    """

    def __init__(self, path: Path, target: Target, texts: Tensor, *, resumes: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not resumes:
            path.unlink(missing_ok=True)
        shape = (*texts.shape, (len(target.tap_ids) + 1) * target.config.hidden_size)
        self._target, self._texts = target, texts
        self._states = torch.from_file(
            str(path), shared=True, size=math.prod(shape), dtype=torch.bfloat16
        ).view(shape)
        # The file is zero where nothing is stored, and the last position is stored last.
        self._is_stored = self._states[:, -1].any(dim=-1)

    def read(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return hidden states at the taps and before the output layer, as `Target.read`."""
        new = rows[~self._is_stored[rows]]
        if len(new):
            self._states[new] = torch.cat(self._target.read(self._texts[new]), dim=-1).bfloat16()
            self._is_stored[new] = True
        size = self._target.config.hidden_size
        taps, last = self._states[rows].split([len(self._target.tap_ids) * size, size], dim=-1)
        return taps, last


class Trainer:
    """A head in training and its optimizers."""

    def __init__(
        self, head: DraftHead, target: Target, texts: Tensor, states: StoredStates, recipe: Recipe
    ) -> None:
        self.head, self.target, self.recipe = head, target, recipe
        self.texts, self.states = texts, states
        # Muon is for matrices inside; the output layer has AdamW, as usual.
        named = dict(head.named_parameters())
        output = named.pop("lm_head.weight")
        inner = [each for each in named.values() if each.dim() == 2]
        vectors = [each for each in named.values() if each.dim() != 2]
        outer: list[dict[str, Any]] = [
            {"params": vectors},
            {"params": [output], "lr_share": recipe.output_lr_share},
        ]
        self.optimizers: tuple[Any, ...] = (
            torch.optim.Muon(inner, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(outer, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
        )

    def step(self, place: int) -> list[float]:
        """Learn from a batch, and return the loss of each draft step."""
        rows = rows_of_step(place, len(self.texts), self.recipe.batch)
        states = self.states.read(rows)
        with torch.autocast("cpu", torch.bfloat16):
            losses = draft_losses(self.head, self.target, self.texts[rows], *states)
            loss = sum(STEP_WEIGHT**step * each for step, each in enumerate(losses))
        assert isinstance(loss, Tensor)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(place, self.recipe) * group.get("lr_share", 1.0)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        return [each.item() for each in losses]

    def save(self, path: Path, spent: TrainingState) -> None:
        state = {
            "spent": asdict(spent),
            "recipe": asdict(self.recipe),
            "head": self.head.state_dict(),
            "optimizers": [each.state_dict() for each in self.optimizers],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)

    def load(self, path: Path) -> TrainingState:
        state = torch.load(path)
        recipe = Recipe(**state["recipe"])
        if replace(recipe, num_steps=self.recipe.num_steps) != self.recipe:
            raise SystemExit(
                f"{path} is of {recipe}: repeat its options to resume, but for --num-steps"
            )
        self.head.load_state_dict(state["head"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        return TrainingState(**state["spent"])


def draft_losses(
    head: DraftHead, target: Target, texts: Tensor, taps: Tensor, last: Tensor
) -> list[Tensor]:
    """Return the cross entropy of each draft step to the target's distribution."""
    due = functional.linear(last, target.output_rows[head.draft_token_ids]).float().softmax(dim=-1)
    embeddings = functional.embedding(texts, target.embeddings)
    losses = []
    for step, logits in enumerate(head.unroll(taps, embeddings, UNROLLED)):
        # At position i, the draft is of the token that the target chooses at i + 1 + step.
        num_due = texts.shape[1] - 1 - step
        found = logits[:, :num_due].float().flatten(0, 1)
        losses.append(functional.cross_entropy(found, due[:, step + 1 :].flatten(0, 1)))
    return losses


def learning_rate(step: int, recipe: Recipe) -> float:
    if step < WARM_UP:
        return recipe.peak_lr * (step + 1) / WARM_UP
    part_done = (step - WARM_UP) / max(1, recipe.num_steps - WARM_UP)
    return recipe.peak_lr * (1 - (1 - FINAL_LR_SHARE) * part_done)


def train(
    head: DraftHead, target: Target, texts: Tensor, recipe: Recipe, args: argparse.Namespace
) -> TrainingState:
    """Train to the last step, or to the one that Ctrl-C interrupts."""
    states = StoredStates(args.work / "states", target, texts, resumes=args.resume)
    checkpoint: Path = args.work / "checkpoint.pt"
    trainer = Trainer(head, target, texts, states, recipe)
    before = trainer.load(checkpoint) if args.resume and checkpoint.exists() else TrainingState()
    spent, started, interrupted = before, time.monotonic(), interrupt_flag()
    with Progress(*Progress.get_default_columns(), TextColumn("{task.fields[figures]}")) as bar:
        task = bar.add_task("training", total=recipe.num_steps, completed=before.steps, figures="")
        while spent.steps < recipe.num_steps and not interrupted:
            losses = trainer.step(spent.steps)
            figures = "loss " + " ".join(f"{each:.3f}" for each in losses)
            bar.update(task, advance=1, figures=figures)
            spent = TrainingState(spent.steps + 1, before.duration_s + time.monotonic() - started)
            if spent.steps % STEPS_PER_CHECKPOINT == 0 or interrupted:
                trainer.save(checkpoint, spent)
                bar.print(f"step {spent.steps}: {figures}")
    return spent


def rows_of_step(step: int, num_texts: int, batch: int) -> Tensor:
    """Return texts of a step: an epoch has each text once, in an order that its number seeds."""
    epoch, place = divmod(step, max(1, num_texts // batch))
    random = torch.Generator().manual_seed(SEED * 1_000_003 + epoch)
    return torch.randperm(num_texts, generator=random)[place * batch : (place + 1) * batch]


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Drafts that Baton's engine verified, by place in the draft, and the right ones of them."""

    num_proposed: tuple[int, ...]
    num_accepted: tuple[int, ...]  # up to the last place where one was

    @property
    def rates(self) -> tuple[float, ...]:
        """The share of drafts that is right up to each place."""
        pairs = itertools.zip_longest(self.num_accepted, self.num_proposed, fillvalue=0)
        return tuple(accepted / proposed for accepted, proposed in pairs)

    @property
    def mean_length(self) -> float:
        """Tokens per pass of the target, with the one that it adds itself."""
        return 1 + sum(self.rates)


def measured_prompts(args: argparse.Namespace, tokenizer: Any) -> dict[str, list[list[int]]]:
    """Return prompts that training has not seen, by kind."""
    library, seed = Library(tokenizer, is_held_out=True), SEED + 1_000_000
    with Writer.open(args.target, tokenizer, args.threads) as writer:
        is_chat = writer.marks.is_chat
        length = MAX_MEASURED_PROMPT if is_chat else MEASURED_PROMPT
        own = writer.prompts(NUM_MEASURED, length, seed)
        kind = "chats" if is_chat else "texts of its own"
    return {"files held out": library.excerpts(NUM_MEASURED, MEASURED_PROMPT, seed), kind: own}


def measure(args: argparse.Namespace, prompts: list[list[int]], temperature: float) -> Acceptance:
    """Return how many drafts are right of what the target writes after prompts."""
    with LLM(
        str(args.target),
        num_threads=args.threads,
        max_num_seqs=MEASURED_AT_ONCE,
        speculative=f"eagle3:{MEASURED_DRAFTS}:fixed",
        speculative_model=str(args.out),
        show_progress=False,
    ) as llm:
        sampling = [
            SamplingParams(
                temperature=temperature, seed=SEED + 2_000_000 + place, max_tokens=MEASURED_TOKENS
            )
            for place in range(len(prompts))
        ]
        llm.generate(prompts, sampling)
        stats = llm.engine.scheduler.stats()
    return Acceptance(stats.proposed_by_position, stats.accepted_by_position)


def write_card(args: argparse.Namespace, recipe: Recipe, spent: TrainingState) -> None:
    """Write the model card with the figures measured by this run."""
    head, target = load_head(args.out), Target.load(args.target)
    rows = []
    for kind, prompts in measured_prompts(args, load_tokenizer(args.target)).items():
        for temperature in MEASURED_TEMPERATURES:
            found = measure(args, prompts, temperature)
            rates = " | ".join(f"{rate:.3f}" for rate in found.rates)
            title = f"{kind}, {f'temperature {temperature}' if temperature else 'greedy'}"
            rows.append(
                f"| {title} | {found.num_proposed[0]:,} | {rates} | {found.mean_length:.2f} |"
            )
            print(rows[-1], flush=True)
    weights = args.out / "model.safetensors"
    num_target, num_head, num_step = count_parameters(target, head)
    card = string.Template(CARD_TEMPLATE.read_text(encoding="utf-8")).substitute(
        asdict(recipe),
        rows="\n".join(rows),
        target=args.target.name,
        title="the demo model" if args.target == ROOT / "models" / "demo" else args.target.name,
        tap_ids=", ".join(map(str, getattr(head.config, TAP_IDS))),
        num_layers=target.config.num_hidden_layers,
        num_target=f"{num_target / 1e6:.2f}",
        num_head=f"{num_head / 1e6:.2f}",
        num_step=f"{num_step / 1e6:.2f}",
        step_share=f"{num_step / num_target:.0%}",
        hidden_size=head.config.hidden_size,
        inner_size=head.config.intermediate_size,
        num_drafted=f"{len(head.d2t):,}",
        vocab_size=f"{head.config.vocab_size:,}",
        command=command(args, recipe),
        user_temperature=USER_TEMPERATURE,
        prompt=PROMPT,
        **count_texts(recipe)._asdict(),
        size_mb=f"{weights.stat().st_size / 1e6:.1f}",
        num_measured=NUM_MEASURED,
        measured_prompt=MEASURED_PROMPT,
        measured_tokens=MEASURED_TOKENS,
        torch=torch.__version__,
        isa=torch.backends.cpu.get_cpu_capability(),
        seed=SEED,
        unrolled=UNROLLED,
        minutes=f"{spent.duration_s / 60:.0f}",
        threads=args.threads,
        weights_digest=hashlib.sha256(weights.read_bytes()).hexdigest(),
    )
    (args.out / "README.md").write_text(card, encoding="utf-8")


def command(args: argparse.Namespace, recipe: Recipe) -> str:
    """Return the command that makes the folder."""
    words = ["python -m tools.train_draft_head"]
    if args.target != ROOT / "models" / "demo":
        words.append(f"--target {args.target.name} --out {args.out.name}")
    for name, value in asdict(recipe).items():
        if value != getattr(Recipe(), name):
            words.append(f"--{name.replace('_', '-')} {value}")
    return " ".join(words)


if __name__ == "__main__":
    sys.exit(main())
