"""Make token files of Shakespeare's plays with GPT-2's byte-pair encoding, to finetune GPT-2 on.

    python data/shakespeare/prepare.py [--input FILE]

Reads the text as data/shakespeare_char/prepare.py does. Writes train.bin (301,966 tokens), val.bin
(36,059) and meta.json into this script's folder.
"""

import sys
from pathlib import Path

# The repository; Python adds only this folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from data.shakespeare_char.prepare import main

if __name__ == "__main__":
    main("shakespeare", "gpt2")
