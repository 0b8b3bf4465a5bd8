"""Scripts produce the same output in a session as in plain bash."""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING

from engine.awake_sandbox import open_sandbox

if TYPE_CHECKING:
    from pathlib import Path

    from smokebox.types import ExecResult

PIECES = r"""
echo a b  c
printf '%s|' "$@" x; echo
false
nosuch_command --flag
x=5; ((x > 3)) && echo big
for i in 1 2 3; do echo -n $i; done; echo
while read -r l; do echo "[$l]"; done <<< $'p\nq'
cat <<E
$((6*7)) $(echo sub)
E
case abc in a*) echo match;; esac
f() { local v=$1; echo "f:$v"; return 3; }; f arg
echo err >&2
ls /nonexistent
(exit 9)
[ 1 -eq 2 ] || echo unequal
[[ foo =~ ^f(o+)$ ]] && echo ${BASH_REMATCH[1]}
echo ${undefined:-default} "${#undefined}"
a=(1 2 3); echo "${a[@]:1}" ${#a[@]}
! true
echo one | tr a-z A-Z | cat
set -- q r; echo $# $2; shift; echo $1
exit 6
echo $((1/0))
declare -A m; m[k]=v; echo ${m[k]} ${!m[@]}
eval 'echo evaluated; false'
cd /nonexistent
echo "unclosed
until true; do :; done
time_is=$(date +%Y | wc -c); echo $time_is
kill -9 $BASHPID
set -e
echo {1..5} ~ | head -c 20
printf '%d\n' notanumber
read -r a b <<< "1 2"; echo $b$a
echo $LINENO; echo $0 | sed 's,.*/,,'
test -d /tmp && pwd
break
unset -v PATH; ls; PATH=/usr/bin:/bin
exec 3>/dev/null; echo to3 >&3
echo $? $- | tr -d cs
""".strip()


def random_scripts() -> list[str]:
    """Return random scripts of a few pieces, from a fixed seed."""
    generator = random.Random(3)
    # A heredoc is one piece.
    pieces = re.split(r"\n(?!\$\(\(|E\n)", PIECES)
    return [
        generator.choice([";", "\n"]).join(generator.sample(pieces, generator.randint(1, 4)))
        for _ in range(60)
    ]


def normalize(result: ExecResult) -> tuple[int, str, str]:
    """Return the result without the name of the shell, which differs."""
    stderr = re.sub(r"(?m)^(/bin/)?bash: (-c: |eval: )?", "bash: ", result.stderr)
    return result.exit_code, result.stdout, re.sub(r" +\d+ Killed", " Killed", stderr)


async def test_random_scripts_behave_as_in_plain_bash(tmp_path: Path) -> None:
    async with open_sandbox(tmp_path) as sandbox:
        for script in random_scripts():
            session = await sandbox.sessions.create("random")
            plain, in_session = (
                await sandbox.run_command(script),
                await session.exec(script, timeout=15),
            )
            assert normalize(in_session) == normalize(plain), script
            await sandbox.sessions.delete("random")
