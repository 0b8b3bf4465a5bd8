"""Scripts do in a session what they do in plain bash, to the byte."""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING

from engine.session_box import open_box

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


def snippets() -> list[str]:
    """Random scripts of a few pieces; the same ones each time."""
    dice = random.Random(3)
    # A heredoc is one piece.
    pieces = re.split(r"\n(?!\$\(\(|E\n)", PIECES)
    return [
        dice.choice([";", "\n"]).join(dice.sample(pieces, dice.randint(1, 4))) for _ in range(60)
    ]


def shown(result: ExecResult) -> tuple[int, str, str]:
    """What is the same in a session: how the shell is called is not."""
    stderr = re.sub(r"(?m)^(/bin/)?bash: (-c: |eval: )?", "bash: ", result.stderr)
    return result.exit_code, result.stdout, re.sub(r" +\d+ Killed", " Killed", stderr)


async def test_random_scripts_do_what_they_do_in_plain_bash(tmp_path: Path) -> None:
    async with open_box(tmp_path) as box:
        for snippet in snippets():
            session = await box.sessions.create("random")
            plain, ours = await box.exec(snippet), await session.exec(snippet, timeout=15)
            assert shown(ours) == shown(plain), snippet
            await box.sessions.delete("random")
