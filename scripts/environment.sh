# Sourced by the other scripts: finds the checkout and makes the virtual environment that they run in.
#
#   PYTHON           the interpreter to build on; python3 if unset (3.11 or newer)
#   MHA_VENV_HOME    where environments are kept; the checkout itself if unset

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

die() {
    echo "$(basename "$0"): $*" >&2
    exit 1
}

# constraints_for 3.11: the versions that are tested on that Python.
constraints_for() {
    case $1 in
        3.11) echo "$root/constraints/py311.txt" ;;
        *) echo "$root/constraints/newest.txt" ;;
    esac
}

# ensure_environment data,test [-suffix]: sets $python to an interpreter that has this checkout (editable) with those extras.
# A stamp remembers what was installed, so nothing is installed twice; it is written last, so a broken install is redone.
ensure_environment() {
    local extras=$1 base=${PYTHON:-python3} version constraints venv stamp wanted
    version=$("$base" -c 'import sys; print("%d.%d" % sys.version_info[:2])') || die "cannot run $base; set PYTHON"
    "$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || die "$base is Python $version, 3.11 is needed; set PYTHON"
    constraints=$(constraints_for "$version")
    venv=${MHA_VENV_HOME:-$root}/.venv-py${version/./}${2:-}
    python=$venv/bin/python
    stamp=$venv/installed-$extras
    wanted="$root $(cat "$root/setup.cfg" "$root/pyproject.toml" "$constraints" | cksum)"
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && "$python" -c '' 2>/dev/null; then
        return
    fi
    echo "Installing mha_research[$extras] for Python $version into $venv; this takes some minutes"
    "$python" -m pip --version >/dev/null 2>&1 || "$base" -m venv --clear "$venv" ||
        die "$base cannot make a virtual environment (on Debian: apt-get install python3-venv)"
    "$python" -m pip install --quiet --disable-pip-version-check --no-input \
        --constraint "$constraints" --editable "$root[$extras]" || die "installing failed"
    echo "$wanted" >"$stamp"
}
