#!/bin/sh
# Make a patched llama.cpp tree to edit by hand:   scripts/dev_tree.sh DIR [TREE_OR_SDIST]
# Build with -DKVFOLD_LLAMA_CPP_DIR=DIR and turn edits into patches with scripts/make_patches.py DIR.
# Edits survive: a tree made by this script is used in place and never patched again.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
[ $# -ge 1 ] || { echo "usage: $0 DIR [llama.cpp tree or llama-cpp-python source distribution]" >&2; exit 2; }
python=${PYTHON:-python3}
if [ $# -ge 2 ]; then
    exec "$python" "$root/cmake/llama_source.py" dev "$1" --from "$2" --download "$root/build/download"
fi
exec "$python" "$root/cmake/llama_source.py" dev "$1" --download "$root/build/download"
