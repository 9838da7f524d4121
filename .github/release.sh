#!/usr/bin/env bash
# Check that this commit can be released: .github/release.sh [--tag] [STEP...]
#
#   tree        no uncommitted changes, and no tag of this version yet
#   changelog   a dated entry for this version, nothing below "Unreleased", and the same version in CITATION.cff
#   build       sdist and wheel in OUT, with metadata that PyPI accepts
#   install     the wheel in an empty environment, and `ds-pretrain quickstart` in an empty folder
#   machine     the image in a bare Debian (as root)
#   versions    the other versions of Python, torch, DeepSpeed and transformers
#
# Without names, all steps run in this order, until one fails. --tag: then create the tag. OUT is the folder for the
# sdist and the wheel (default: dist). VENV is the environment with the development tools (default: .venv).
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="${VENV:-$PWD/.venv}/bin:$PATH"
OUT=${OUT:-dist}
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' pretrain/__init__.py)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
die() { echo "release.sh: $*" >&2; exit 2; }

tree() {
    [ -z "$(git status --porcelain)" ] || die "there are uncommitted changes. Remedy: commit them"
    ! git rev-parse -q --verify "refs/tags/v$version" >/dev/null ||
        die "the tag v$version exists. Remedy: set the next version in pretrain/__init__.py"
}
changelog() {
    local date
    date=$(sed -n "s/^## \[$version\] - \([0-9-]*\)$/\1/p" .github/CHANGELOG.md)
    [ -n "$date" ] || die ".github/CHANGELOG.md: there is no line \`## [$version] - YYYY-MM-DD\`. Remedy: add it"
    ! sed '1,/^## \[Unreleased\]$/d; /^## \[[0-9]/,$d' .github/CHANGELOG.md | grep . >/dev/null ||
        die ".github/CHANGELOG.md: there are unreleased entries. Remedy: raise the version, and move them below its heading"
    grep -qx "version: $version" .github/CITATION.cff && grep -qx "date-released: $date" .github/CITATION.cff ||
        die ".github/CITATION.cff: the version or the date differs. Remedy: version: $version, date-released: $date"
}
build() {
    rm -f "$OUT"/ds_pretrain-*
    python -m build --no-isolation --outdir "$OUT" . >"$work/log" || { cat "$work/log"; return 1; }
    twine check --strict "$OUT"/ds_pretrain-"$version"{.tar.gz,-py3-none-any.whl}
}
install() {
    python -m venv "$work/venv"
    mkdir "$work/empty"
    pip() { "$work/venv/bin/pip" install -q --disable-pip-version-check -c launch/constraints.txt "$@"; }
    pip setuptools wheel ninja
    pip "$(grep '^torch==' launch/constraints.txt)"
    pip --no-build-isolation "$OUT/ds_pretrain-$version-py3-none-any.whl"
    (cd "$work/empty" && PATH="$work/venv/bin:$PATH" ds-pretrain quickstart)
}
machine() { pytest -m slow tests/cluster/test_images.py; }
versions() { python -m tests.versions; }

tag= steps=()
for word in "$@"; do
    case $word in
        --tag) tag=1 ;;
        tree|changelog|build|install|machine|versions) steps+=("$word") ;;
        *) die "$word: there is no such step or flag. Remedy: sed -n 2,13p .github/release.sh" ;;
    esac
done
[ -z "$tag" ] || [ ${#steps[@]} = 0 ] || die "--tag: a release needs all steps. Remedy: leave out the names of steps"
[ ${#steps[@]} -gt 0 ] || steps=(tree changelog build install machine versions)
for step in "${steps[@]}"; do
    echo "== $step"
    "$step"
done
[ -z "$tag" ] || git tag -a "v$version" -m "ds-pretrain $version"
echo "ds-pretrain $version: ${steps[*]}: passed"
[ -z "$tag" ] || echo "To publish: git push origin v$version && twine upload $OUT/ds_pretrain-$version*"
