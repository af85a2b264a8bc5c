"""Writes the data of embedding-tiny.toml: questions to a help desk with their answers, and a tokenizer of their words.

    python examples/embedding_tiny_data.py

A question names an appliance and what is wrong with it, in the words of a customer. Its answer names both in the words
of a manual, so that no word tells which belong together: the model learns that. Pairs of an appliance and a fault are
held out for evaluation. Everything follows from one seed, and nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

FOLDER = "runs/embedding-tiny-data"

APPLIANCES = {
    "kettle": "water boiler",
    "fridge": "refrigerating cabinet",
    "washer": "laundry machine",
    "oven": "baking chamber",
    "hob": "induction plate",
    "toaster": "bread heater",
    "blender": "mixing jug",
    "vacuum": "floor cleaner",
    "dryer": "tumbling unit",
    "heater": "convector",
    "fan": "ventilator",
    "dishwasher": "crockery rinser",
    "freezer": "deep cooler",
    "iron": "steam press",
    "lamp": "luminaire",
    "radio": "tuner",
}
FAULTS = {
    "does not start": "check the fuse and the mains lead",
    "makes a loud noise": "tighten the motor mount and oil the bearing",
    "leaks": "replace the rubber seal below the tank",
    "smells burnt": "unplug at once and have the wiring inspected",
    "gets too hot": "clear the air inlet and reset the thermostat",
    "stays cold": "measure the resistance of the element",
    "shakes": "level all four feet with a spanner",
    "stops halfway": "update the timer program and empty the filter",
    "shows an error": "note the code and hold both keys for five seconds",
    "will not open": "release the latch with the emergency cord",
    "is too slow": "remove limescale with citric acid",
    "drips rust": "exchange the anode and flush twice",
}
QUESTIONS = (
    "my {thing} {fault} , what can i do",
    "help , the {thing} in our kitchen {fault}",
    "how do i repair a {thing} that {fault}",
    "since yesterday the old {thing} {fault}",
)
HELD_OUT = 48  # pairs of an appliance and a fault
Pair = tuple[str, str]


def answer(pair: Pair) -> str:
    thing, fault = pair
    return f"{APPLIANCES[thing]} : {FAULTS[fault]} ."


def rows(pairs: Iterable[Pair], questions: Iterable[str], draw: random.Random) -> Iterator[dict[str, object]]:
    """Yield each question of each pair with its answer, and a wrong one: of the appliance, with another fault."""
    questions = tuple(questions)
    for thing, fault in pairs:
        for question in questions:
            wrong = answer((thing, draw.choice([other for other in FAULTS if other != fault])))
            query = question.format(thing=thing, fault=fault)
            yield {"query": query, "positive": answer((thing, fault)), "negatives": [wrong]}


def graded(pairs: list[Pair], draw: random.Random) -> Iterator[dict[str, object]]:
    """Yield questions with answers that are right (2), half right (1) and wrong (0)."""
    for thing, fault in pairs:
        others = [(thing, draw.choice(list(FAULTS))), (draw.choice(list(APPLIANCES)), draw.choice(list(FAULTS)))]
        for other in [(thing, fault), *others]:
            label = (other[0] == thing) + (other[1] == fault)
            query = draw.choice(QUESTIONS).format(thing=thing, fault=fault)
            yield {"query": query, "positive": answer(other), "label": label}


def write_rows(path: Path, found: Iterable[dict[str, object]]) -> list[dict[str, object]]:
    written = list(found)
    path.write_text("".join(json.dumps(row) + "\n" for row in written), encoding="utf-8")
    return written


def write_tokenizer(folder: Path, texts: Iterable[str]) -> None:
    """Train a tokenizer of whole words that ends every text with <end>, and save it as transformers does."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    words = sorted({word for text in texts for word in text.split()})
    ids = {word: number for number, word in enumerate(["<pad>", "<unk>", "<end>", *words])}
    tokenizer = Tokenizer(WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.post_processor = TemplateProcessing(single="$A <end>", special_tokens=[("<end>", ids["<end>"])])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", eos_token="<end>", model_max_length=32
    ).save_pretrained(folder)


def write_data(folder: str | Path) -> None:
    """Write train.jsonl, held-out.jsonl, graded.jsonl and the folder tokenizer."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(1)
    pairs = [(thing, fault) for thing in APPLIANCES for fault in FAULTS]
    draw.shuffle(pairs)
    held_out, trained = pairs[:HELD_OUT], pairs[HELD_OUT:]
    every = write_rows(folder / "train.jsonl", rows(trained, QUESTIONS, draw))
    every += write_rows(folder / "held-out.jsonl", rows(held_out, QUESTIONS[:1], draw))
    write_rows(folder / "graded.jsonl", graded(held_out, draw))
    write_tokenizer(folder / "tokenizer", [str(row[name]) for row in every for name in ("query", "positive")])
    print(f"{len(trained) * len(QUESTIONS)} rows to train on and {len(held_out)} held out, in {folder}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the data of examples/embedding-tiny.toml.")
    parser.add_argument("--folder", default=FOLDER)
    write_data(parser.parse_args().folder)
