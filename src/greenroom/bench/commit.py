"""Which commit of greenroom a result was measured with."""

import subprocess
from pathlib import Path

_PACKAGE = Path(__file__).parent.parent


def commit_hash(package: Path = _PACKAGE) -> str | None:
    """The short hash if ``package`` lies in a git checkout that tracks it, else None. A "+" behind it says that the
    package has changes which are not committed, new files included."""
    # A package that was installed somewhere inside another project's checkout is not tracked there.
    tracked = _git(package, "ls-files", "--error-unmatch", "__init__.py")
    if tracked is None:
        return None
    changed = _git(package, "status", "--porcelain", "--", ".") is not None
    head = _git(package, "rev-parse", "--short", "HEAD")
    return head and head + "+" * changed


def _git(folder: Path, *arguments: str) -> str | None:
    """The output's one line; None if git is missing, is of no help, or takes too long."""
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
