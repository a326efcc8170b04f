"""Where `mpidp._core` is looked for when the package runs from its source tree.

One tree serves several Python environments, each with its own MPI (scripts/setup.sh --mpi), and
an extension built for one must not load in another. So an in-place build goes to a folder of its
environment, which comes first. And a tree that comes first on sys.path (`python -m mpidp` in its
root) where this environment built nothing takes the extension of the installed package.
"""

from __future__ import annotations

import os
import pkgutil
import sys
import zlib


def search_path(package_path: list[str]) -> list[str]:
    """The `__path__` for the package: `package_path` and where else the extension may lie.

    Example: `__path__ = search_path(__path__)` in the package's `__init__.py`.
    """
    tree = os.path.dirname(package_path[0])
    # setup.py names the folder by the same formula.
    tag = format(zlib.crc32(sys.prefix.encode()), "08x")
    own = os.path.join(tree, "build", f"ext-{tag}")
    if os.path.isdir(own):
        return [own, *package_path]
    paths = list(pkgutil.extend_path(package_path, "mpidp"))
    latest = os.path.join(tree, "build", "ext-latest")
    return [*paths, latest] if os.path.isdir(latest) else paths
