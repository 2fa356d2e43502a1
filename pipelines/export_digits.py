"""Write the built-in digits as image files in folders by class: data for vlm_sft_classification.toml.

python -m pipelines.export_digits data/digits        data/digits/{train,val,test}/{0..9}/digit-0001.png
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from ops.ingest.digits import digit_named, digit_samples


def export_digits(folder: Path) -> Counter[str]:
    """Write one PNG per digit, in the splits of the built-in sample; returns the number of images in each split."""
    counts: Counter[str] = Counter()
    for sample in digit_samples():
        digit = digit_named(sample.turns[-1].content[-1])
        file = folder / sample.split / str(digit) / f"{sample.id}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(sample.images[0])
        counts[sample.split] += 1
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the built-in digits as PNG files in folders by class.")
    parser.add_argument("folder", type=Path, help="made where it is not there yet")
    folder = parser.parse_args().folder
    print(f"{folder}: " + ", ".join(f"{split} {count}" for split, count in sorted(export_digits(folder).items())))


if __name__ == "__main__":
    main()
