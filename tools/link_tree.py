"""Lays `build/tree/asyncbook` out as it is installed, in links, for tools that look at files instead of importing."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TREE = ROOT / "build" / "tree" / "asyncbook"


def main() -> None:
    TREE.mkdir(parents=True, exist_ok=True)
    wanted = {path.name: path for path in (ROOT / "asyncbook").iterdir() if path.name != "__pycache__"}
    wanted |= {"ipc": ROOT / "ipc", "worker": ROOT / "worker"}
    for link in TREE.iterdir():
        if link.name not in wanted:
            link.unlink()
    for name, target in wanted.items():
        link = TREE / name
        if not link.is_symlink():
            link.symlink_to(target)


if __name__ == "__main__":
    main()
