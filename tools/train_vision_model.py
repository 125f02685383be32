"""Train the demo model that sees: a small Idefics3 that reads numbers, shapes and colours.

A vision tower of SigLIP's kind with pixel shuffle stands in front of a small Llama with the demo
model's tokenizer. Both are trained from random weights, on drawings made on the fly
(`tools/number_pictures.py`) and on chats about them. It writes a Hugging Face folder with a model
card, whose figures are measured on that folder, loaded again from disk. The constants below and
the seed are the whole recipe.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import string
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from rich.progress import Progress, TextColumn, track
from tokenizers import AddedToken, Tokenizer
from torch import Tensor
from torch.nn import functional
from transformers import (
    AutoProcessor,
    GenerationConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
    PreTrainedTokenizerFast,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.utils import logging as transformers_logging

from baton.core.sampling import SamplingParams
from baton.llm import LLM
from tools.number_pictures import COLOURS, NO_THING, SHAPES, draw, draw_any
from tools.train_demo_model import interrupt_flag

SEED = 58
THREADS = 1
STEPS = 1600
TOWER_STEPS = 700  # of the tower alone
PICTURES = 64  # of such a step
CHATS = 20  # of a later step, with two pictures each
NUM_DRAWINGS = 24_000
WARM_UP = 40
PEAK_LR = 3e-3
FINAL_LR = 5e-5
WEIGHT_DECAY = 0.05
STEPS_PER_CHECKPOINT = 100

EDGE = 64  # pixels along a side of what the tower gets
PATCH = 8
MERGE = 2
NUM_PLACEHOLDERS = (EDGE // PATCH // MERGE) ** 2
CONTEXT = 2048
MAX_ANSWER = 8  # tokens
NUM_HELD_OUT = 500  # drawings
EXAMPLE = "number"  # a picture next to the model

MARK, AROUND, WHOLE = "<image>", "<fake_token_around_image>", "<global-img>"
ROLES = ("system", "user", "assistant")
BOS, EOS = "<|begin|>", "<|end|>"
PICTURE_TEXT = AROUND + WHOLE + MARK * NUM_PLACEHOLDERS + AROUND
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<image>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
QUESTIONS = {  # after the name of the field of a drawing that answers it
    "number": "Which number is in the {}picture?",
    "number_colour": "What colour is the number in the {}picture?",
    "shape": "What shape is in the {}picture?",
    "shape_colour": "What colour is the shape in the {}picture?",
}
QUESTION_WEIGHTS = (5, 1, 2, 1)
ORDINALS = ("first ", "second ")

# While it is trained, the tower also has to name what is drawn at PLACES from left to right of each
# patch, its colour, and a digit's place in its number, by a layer that is not kept. So it learns to
# read from far fewer pictures.
THINGS = (NO_THING, *string.digits, *SHAPES)
INKS = (NO_THING, *COLOURS)
ORDER = range(5)  # 0: no digit
LABELS = (len(THINGS), len(INKS), len(ORDER))
PLACES = 2

ROOT = Path(__file__).resolve().parent.parent
TEXT_MODEL = ROOT / "models" / "demo"
CARD_TEMPLATE = Path(__file__).with_name("vision_model_card.md")


@dataclass(frozen=True, slots=True)
class TrainingState:
    """Progress of training: steps and time, including earlier runs that were resumed."""

    steps: int = 0
    duration_s: float = 0.0


def main() -> int:
    args = parse_args()
    torch.set_num_threads(THREADS)
    torch.manual_seed(SEED)
    transformers_logging.disable_progress_bar()
    tokenizer = make_tokenizer()
    model = Idefics3ForConditionalGeneration(model_config(tokenizer))
    model.set_attn_implementation("eager")  # the fastest one for so few tokens
    print(f"{sum(each.numel() for each in model.parameters()):,} parameters", flush=True)
    spent = train(model, tokenizer, args)
    if spent.steps < STEPS:
        print(f"stopped after step {spent.steps}; continue with --resume", file=sys.stderr)
        return 130
    export(model, tokenizer, args.out)
    write_card(args.out, spent)
    return 0


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / "models" / "demo-vision",
        help="folder to write (%(default)s)",
    )
    parser.add_argument(
        "--checkpoint",
        type=Path,
        default=ROOT / "build" / "vision_model.pt",
        help="checkpoint of a stopped run (%(default)s)",
    )
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint")
    return parser.parse_args()


def make_tokenizer() -> Any:
    """Return the demo model's tokenizer with marks of pictures and roles."""
    tokenizer = Tokenizer.from_file(str(TEXT_MODEL / "tokenizer.json"))
    # The last one is unused here, but added by the processor of transformers.
    marks = (AROUND, WHOLE, MARK, *(f"<|{role}|>" for role in ROLES), "<end_of_utterance>")
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def model_config(tokenizer: Any) -> Idefics3Config:
    return Idefics3Config(
        vision_config={
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_hidden_layers": 5,
            "num_attention_heads": 4,
            "image_size": EDGE,
            "patch_size": PATCH,
        },
        text_config={
            "model_type": "llama",
            "vocab_size": len(tokenizer),
            "hidden_size": 128,
            "intermediate_size": 320,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": CONTEXT,
            "tie_word_embeddings": True,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": None,
        },
        scale_factor=MERGE,
        image_token_id=tokenizer.convert_tokens_to_ids(MARK),
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
    )


def train(model: Any, tokenizer: Any, args: argparse.Namespace) -> TrainingState:
    """Train to the last step, or to the one that Ctrl-C interrupts."""
    pupil = Pupil(model)
    before = load_checkpoint(args.checkpoint, pupil) if args.resume else TrainingState()
    spent, started = before, time.monotonic()
    pool = [drawn(seed) for seed in track(range(NUM_DRAWINGS), "drawing")]
    interrupted = interrupt_flag()
    with Progress(*Progress.get_default_columns(), TextColumn("{task.fields[figures]}")) as bar:
        task = bar.add_task("training", total=STEPS, completed=before.steps, figures="")
        while spent.steps < STEPS and not interrupted:
            figures = train_step(pupil, tokenizer, pool, spent.steps)
            bar.update(task, advance=1, figures=figures)
            spent = TrainingState(spent.steps + 1, before.duration_s + time.monotonic() - started)
            if spent.steps % STEPS_PER_CHECKPOINT == 0 or interrupted:
                save_checkpoint(args.checkpoint, pupil, spent)
                bar.print(f"step {spent.steps}: {figures}")
    return spent


@dataclass(frozen=True, slots=True)
class Drawn:
    """A drawing as the tower gets it, and what is in it."""

    pixels: Tensor  # uint8 [3, EDGE, EDGE]
    labels: Tensor  # of each place: indices of THINGS, INKS and ORDER [3, places]
    answers: dict[str, str]  # by topic


def drawn(seed: int | str) -> Drawn:
    drawing = draw_any(seed)
    small = drawing.image.resize((EDGE, EDGE), Image.Resampling.LANCZOS)
    pixels = torch.from_numpy(np.array(small).transpose(2, 0, 1).copy())
    shape = (EDGE // PATCH, EDGE // PATCH * PLACES)
    labels = np.zeros((len(LABELS), *shape), np.int64)
    rows, columns = ((np.arange(count) + 0.5) / count for count in shape)
    width, height = drawing.image.size
    for place, (name, (left, top, right, bottom)) in enumerate(drawing.boxes, 1):
        is_in_rows = (rows * height >= top) & (rows * height < bottom)
        is_in_columns = (columns * width >= left) & (columns * width < right)
        is_digit = name in string.digits
        ink = drawing.number_colour if is_digit else drawing.shape_colour
        named = (THINGS.index(name), INKS.index(ink), place if is_digit else 0)
        for label, index in zip(labels, named, strict=True):
            label[np.ix_(is_in_rows, is_in_columns)] = index
    answers = {topic: getattr(drawing, topic) for topic in QUESTIONS}
    return Drawn(pixels, torch.from_numpy(labels).flatten(1), answers)


class Pupil:
    """The model in training, with a layer that is not kept, and the optimizers of both."""

    def __init__(self, model: Any) -> None:
        self.model = model
        model.train()
        size = model.config.vision_config.hidden_size
        self.namer = torch.nn.Linear(size, PLACES * sum(LABELS))
        named = [*model.named_parameters(), *self.namer.named_parameters()]
        is_inner = {name: each.dim() == 2 and ".layers." in name for name, each in named}
        self.parameters = [each for _, each in named]
        inner = [each for name, each in named if is_inner[name]]
        outer = [each for name, each in named if not is_inner[name]]
        self.optimizers: tuple[Any, ...] = (
            torch.optim.Muon(inner, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(outer, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
        )

    def learn(self, loss: Tensor, step: int) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for optimizer in self.optimizers:
            optimizer.step()


def learning_rate(step: int) -> float:
    if step < WARM_UP:
        return PEAK_LR * (step + 1) / WARM_UP
    part_done = (step - WARM_UP) / (STEPS - WARM_UP)
    return FINAL_LR + (PEAK_LR - FINAL_LR) * (1 - part_done)


def train_step(pupil: Pupil, tokenizer: Any, pool: list[Drawn], step: int) -> str:
    """Learn from random drawings, and return figures.

    Seeded by the step, so that a resumed run gets the drawings of an uninterrupted one.
    """
    rng = random.Random(f"{SEED} {step}")
    if step < TOWER_STEPS:
        seen = rng.choices(pool, k=PICTURES)
        with torch.autocast("cpu", torch.bfloat16):
            loss = naming_loss(pupil, seen, patch_features(pupil.model, seen))
        pupil.learn(loss, step)
        return f"naming {loss.item():.3f}"
    batch = ChatBatch(tokenizer, [random_chat(rng, pool) for _ in range(CHATS)])
    with torch.autocast("cpu", torch.bfloat16):
        patches = patch_features(pupil.model, batch.seen)
        naming = naming_loss(pupil, batch.seen, patches)
        logits, due = answer_logits(pupil.model, batch, patches)
        loss = functional.cross_entropy(logits.float(), due)
    pupil.learn(loss + naming, step)
    right = (logits.argmax(dim=1) == due).float().mean().item()
    return f"naming {naming.item():.3f}, answers {loss.item():.3f}, {right:.1%} of tokens right"


@dataclass(frozen=True, slots=True)
class Turn:
    """Pictures that are shown, a question, and its answer."""

    seen: tuple[Any, ...]
    question: str
    answer: str


def random_chat(rng: random.Random, pool: list[Drawn]) -> list[Turn]:
    """Return turns about two pictures, shown one by one or together."""
    first, second = rng.choices(pool, k=2)
    if rng.random() < 0.5:
        return _turns_about(rng, (first, second), rng.randint(2, 3))
    return [
        *_turns_about(rng, (first,), rng.randint(1, 2)),
        *_turns_about(rng, (second,), rng.randint(1, 2)),
    ]


def _turns_about(rng: random.Random, seen: tuple[Drawn, ...], num_questions: int) -> list[Turn]:
    """Return questions about pictures that are shown with the first of them."""
    turns = []
    for place in range(num_questions):
        [topic] = rng.choices(list(QUESTIONS), QUESTION_WEIGHTS)
        which = rng.randrange(len(seen))
        ordinal = ORDINALS[which] if len(seen) > 1 else ""
        answer = seen[which].answers[topic]
        turns.append(Turn(() if place else seen, QUESTIONS[topic].format(ordinal), answer))
    return turns


class ChatBatch:
    """Tokens of chats, padded to the longest, and their pictures."""

    def __init__(self, tokenizer: Any, chats: list[list[Turn]]) -> None:
        rows = [_tokens_and_labels(tokenizer, chat) for chat in chats]
        longest = max(len(tokens) for tokens, _ in rows)
        self.token_ids = torch.zeros(len(rows), longest, dtype=torch.int64)
        self.labels = torch.full((len(rows), longest), -1)
        for row, (tokens, labels) in enumerate(rows):
            self.token_ids[row, : len(tokens)] = torch.tensor(tokens)
            self.labels[row, : len(labels)] = torch.tensor(labels)
        self.seen = [each for chat in chats for turn in chat for each in turn.seen]


def _tokens_and_labels(tokenizer: Any, chat: list[Turn]) -> tuple[list[int], list[int]]:
    """Return tokens, and for each the next one if that is a part of an answer, or -1."""
    tokens, is_answer = [tokenizer.bos_token_id], [False]
    for turn in chat:
        asked = [*_ids(tokenizer, "<|user|>" + PICTURE_TEXT * len(turn.seen))]
        asked += _ids(tokenizer, turn.question + "<|assistant|>")
        answer = _ids(tokenizer, turn.answer + EOS)
        tokens += [*asked, *answer]
        is_answer += [False] * len(asked) + [True] * len(answer)
    labels = [token if is_one else -1 for token, is_one in zip(tokens, is_answer, strict=True)]
    return tokens, [*labels[1:], -1]


@cache
def _ids(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))


# The parts of the model are called one by one: as a whole, it would search the pictures for
# padding, and compute logits for each token.


def patch_features(model: Any, seen: list[Drawn]) -> Tensor:
    """Return what the tower makes of each patch, [pictures, patches, features]."""
    vision = model.model.vision_model
    pixels = torch.stack([each.pixels for each in seen]).float() / 127.5 - 1
    patches = vision.embeddings.patch_embedding(pixels).flatten(2).transpose(1, 2)
    patches = patches + vision.embeddings.position_embedding.weight
    patches = vision.encoder(inputs_embeds=patches, attention_mask=None).last_hidden_state
    features: Tensor = vision.post_layernorm(patches)
    return features


def naming_loss(pupil: Pupil, seen: list[Drawn], patches: Tensor) -> Tensor:
    found = pupil.namer(patches).unflatten(2, (PLACES, sum(LABELS))).flatten(0, 2).float()
    due = torch.stack([each.labels for each in seen], dim=1).flatten(1)
    losses = map(functional.cross_entropy, found.split(LABELS, dim=1), due)
    return torch.stack([*losses]).sum()


def answer_logits(model: Any, batch: ChatBatch, patches: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits for each token of an answer, and the token that is due."""
    text = model.model.text_model
    encodings = model.model.connector(patches)
    embeddings = text.embed_tokens(batch.token_ids).to(encodings.dtype)
    places = batch.token_ids == model.config.image_token_id
    embeddings = embeddings.masked_scatter(places[:, :, None], encodings)
    hidden = text(inputs_embeds=embeddings, use_cache=False).last_hidden_state
    is_answer = batch.labels >= 0
    return model.lm_head(hidden[is_answer]), batch.labels[is_answer]


def save_checkpoint(path: Path, pupil: Pupil, spent: TrainingState) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {
        "spent": asdict(spent),
        "model": pupil.model.state_dict(),
        "namer": pupil.namer.state_dict(),
        "optimizers": [each.state_dict() for each in pupil.optimizers],
    }
    torch.save(state, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def load_checkpoint(path: Path, pupil: Pupil) -> TrainingState:
    state = torch.load(path)
    pupil.model.load_state_dict(state["model"])
    pupil.namer.load_state_dict(state["namer"])
    for optimizer, saved in zip(pupil.optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    return TrainingState(**state["spent"])


def export(model: Any, tokenizer: Any, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    # Sampled from the likeliest token alone: greedy, if clients do not say otherwise.
    model.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        eos_token_id=model.config.eos_token_id,
        do_sample=True,
        top_k=1,
    )
    model.bfloat16().save_pretrained(folder)
    # save_pretrained makes it readable by its owner only.
    (folder / "model.safetensors").chmod(0o644)
    edges = {"size": {"longest_edge": 4 * EDGE}, "max_image_size": {"longest_edge": EDGE}}
    half = [0.5] * 3
    images = Idefics3ImageProcessorPil(
        **edges, do_image_splitting=False, image_mean=half, image_std=half
    )
    Idefics3Processor(
        images, tokenizer, image_seq_len=NUM_PLACEHOLDERS, chat_template=CHAT_TEMPLATE
    ).save_pretrained(folder)
    draw(EXAMPLE, number="4071", has_shape=True).image.save(folder / f"{EXAMPLE}.png")


@dataclass(frozen=True, slots=True)
class Exam:
    """Questions of one kind about held-out drawings."""

    title: str
    turns: list[Turn]


def exams() -> list[Exam]:
    """Return questions about drawings whose seeds training does not use."""
    drawings = [draw_any(f"held out {place}") for place in range(NUM_HELD_OUT)]
    found = []
    for topic, question in QUESTIONS.items():
        asked = question.format("")
        shown = [one for one in drawings if getattr(one, topic) != NO_THING]
        found.append(Exam(asked, [Turn((one,), asked, getattr(one, topic)) for one in shown]))
    asked = QUESTIONS["number"].format(ORDINALS[1])
    pairs = [two for two in pairwise(drawings) if two[1].number != NO_THING]
    found.append(Exam(asked, [Turn(two, asked, two[1].number) for two in pairs]))
    asked = QUESTIONS["number"].format("")
    shown = [one for one in drawings if one.number == NO_THING]
    found.append(Exam(f"{asked} (none)", [Turn((one,), asked, NO_THING) for one in shown]))
    return found


def prompts_of(tokenizer: Any, exam: Exam) -> list[str]:
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": MARK * len(turn.seen) + turn.question}],
            tokenize=False,
            add_generation_prompt=True,
        )
        for turn in exam.turns
    ]


@torch.inference_mode()
def answers_of_transformers(folder: Path) -> Iterator[list[str]]:
    """Yield the greedy answers to each exam, with the processor of the folder."""
    model: Any = Idefics3ForConditionalGeneration.from_pretrained(
        folder, dtype=torch.bfloat16
    ).eval()
    processor: Any = AutoProcessor.from_pretrained(folder)
    for exam in exams():
        texts, found = prompts_of(processor.tokenizer, exam), list[str]()
        for start in range(0, len(texts), PICTURES):
            turns = exam.turns[start : start + PICTURES]
            images = [[each.image for each in turn.seen] for turn in turns]
            inputs = processor(
                text=texts[start : start + PICTURES],
                images=images,
                add_special_tokens=False,
                return_tensors="pt",
            ).to(torch.bfloat16)
            output = model.generate(**inputs, max_new_tokens=MAX_ANSWER, pad_token_id=0)
            answers = output[:, inputs["input_ids"].shape[1] :]
            found += processor.batch_decode(answers, skip_special_tokens=True)
        yield found


def answers_of_baton(folder: Path) -> Iterator[list[str]]:
    """Yield the greedy answers to each exam."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    greedy = SamplingParams(temperature=0, max_tokens=MAX_ANSWER)
    with LLM(str(folder), num_threads=THREADS, show_progress=False) as llm:
        for exam in exams():
            # The engine puts the first token in front itself.
            prompts = [text.removeprefix(BOS) for text in prompts_of(tokenizer, exam)]
            images = [[each.image for each in turn.seen] for turn in exam.turns]
            yield [answer.text for answer in llm.generate(prompts, greedy, images=images)]


def write_card(folder: Path, spent: TrainingState) -> None:
    """Write the model card with the figures measured by this run."""
    rows = []
    answers = zip(answers_of_transformers(folder), answers_of_baton(folder), strict=True)
    for exam, (theirs, ours) in zip(exams(), answers, strict=True):
        due = [turn.answer for turn in exam.turns]
        shares = (_share_of_equal(theirs, due), _share_of_equal(ours, due))
        same = _share_of_equal(ours, theirs)
        rows.append(f"| {exam.title} | {len(due)} | {shares[0]} | {shares[1]} | {same} |")
        print(rows[-1], flush=True)
    weights = folder / "model.safetensors"
    card = string.Template(CARD_TEMPLATE.read_text(encoding="utf-8")).substitute(
        rows="\n".join(rows),
        torch=torch.__version__,
        isa=torch.backends.cpu.get_cpu_capability(),
        seed=SEED,
        steps=f"{STEPS:,}",
        num_drawings=f"{NUM_DRAWINGS:,}",
        edge=EDGE,
        num_held_out=NUM_HELD_OUT,
        patch=PATCH,
        minutes=f"{spent.duration_s / 60:.0f}",
        size_mb=f"{weights.stat().st_size / 1e6:.1f}",
        weights_digest=hashlib.sha256(weights.read_bytes()).hexdigest(),
    )
    (folder / "README.md").write_text(card, encoding="utf-8")


def _share_of_equal(answers: list[str], others: list[str]) -> str:
    num_equal = sum(one == other for one, other in zip(answers, others, strict=True))
    return f"{num_equal / len(others):.1%}"


if __name__ == "__main__":
    sys.exit(main())
