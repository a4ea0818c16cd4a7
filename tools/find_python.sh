#!/bin/sh
# Prints the path of an interpreter that the project can be developed with, or says what to install.
#
# The first that runs and can make a virtual environment: python3 and python3.13 to python3.10 on
# PATH, then those of pyenv. A newer one is the last resort: it works, without the embedded server.

oldest=10 newest=13

# Succeeds, and prints the interpreter's own path, if the command "$@" is one of Python 3.$1 to 3.$2.
ask() {
    from=$1 to=$2
    shift 2
    "$@" -c "import sys, venv, ensurepip
if not (3, $from) <= sys.version_info[:2] <= (3, $to): sys.exit(1)
print(sys.executable)" 2>/dev/null
}

ask $oldest $newest python3 && exit
minor=$newest
while [ "$minor" -ge $oldest ]; do
    ask "$minor" "$minor" "python3.$minor" && exit
    minor=$((minor - 1))
done
minor=$newest
while [ "$minor" -ge $oldest ]; do
    # What stands on PATH may be a shim, which runs only the version that it is told.
    PYENV_VERSION=3.$minor ask "$minor" "$minor" "python3.$minor" && exit
    for python in "${PYENV_ROOT:-$HOME/.pyenv}/versions/3.$minor".*/bin/python3; do
        ask "$minor" "$minor" "$python" && exit
    done
    minor=$((minor - 1))
done
for command in python3 python3.15 python3.14; do
    ask $((newest + 1)) 99 "$command" && exit
done

found=$(python3 -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null) || found=missing
echo "Python 3.$oldest to 3.$newest is needed, with its module venv; python3 is $found, and no other was found.
Install one, for example python3.12 and python3.12-venv, or: pyenv install 3.12
Or name the one to take: make PYTHON=/path/to/python3.12 ..." >&2
exit 1
