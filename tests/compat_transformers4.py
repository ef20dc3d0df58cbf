"""Does an exported folder mean the same model to transformers 4.57? Run by `make compat`, in an environment of its own.

python tests/compat_transformers4.py write FOLDER    # with featcal installed: export, and save the features
python tests/compat_transformers4.py read FOLDER     # with any transformers: load, compare
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import transformers
from transformers import CLIPModel, CLIPVisionModel


def features(folder: Path) -> dict[str, torch.Tensor]:
    """Pooled features of fixed noise by both classes; exits if a weight would be re-initialised."""
    found = {}
    for loader in (CLIPModel, CLIPVisionModel):
        model, report = loader.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
        if report["missing_keys"] or report["mismatched_keys"]:
            sys.exit(f"transformers {transformers.__version__} re-initialises {sorted(report['missing_keys'])[:4]}")
        tower = getattr(model, "vision_model", model).eval()
        pixels = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            found[loader.__name__] = tower(pixel_values=pixels).pooler_output
    return found


def main() -> None:
    action, folder = sys.argv[1], Path(sys.argv[2])
    if action == "write":
        import featcal

        featcal.calibrate(featcal.load_suite("clip-mini"), featcal.CalibrationConfig(samples=16)).save(folder)
        torch.save(features(folder), folder / "features.pt")
        return
    written = torch.load(folder / "features.pt", weights_only=True)
    for name, ours in features(folder).items():
        difference = float((ours - written[name]).abs().max())
        print(f"transformers {transformers.__version__}, {name}: largest difference {difference:.1e}")
        if difference > 1e-5:
            sys.exit("the features differ")


if __name__ == "__main__":
    main()
