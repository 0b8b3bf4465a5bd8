"""`smokebox completion`: the script that has a shell complete command lines."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

_BASH = r"""# Have it with: eval "$(smokebox completion bash)"
_smokebox() {
    local IFS=$'\n'
    COMPREPLY=($(smokebox complete -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null | cut -f1))
    [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *: ]] && compopt -o nospace
}
complete -o bashdefault -o default -F _smokebox smokebox
"""

_ZSH = r"""#compdef smokebox
# Have it with: eval "$(smokebox completion zsh)"
_smokebox() {
    local -a found
    local line
    for line in "${(@f)$(smokebox complete -- "${(@)words[2,CURRENT]}" 2>/dev/null)}"; do
        [[ -n $line ]] && found+=("${${line%%$'\t'*}//:/\\:}:${line#*$'\t'}")
    done
    if (( ${#found} )); then
        _describe smokebox found
    else
        _files
    fi
}
if [[ $funcstack[1] == _smokebox ]]; then
    _smokebox
else
    compdef _smokebox smokebox
fi
"""

_FISH = r"""# Have it with: smokebox completion fish | source
function __smokebox_complete
    set -l words (commandline -opc) (commandline -ct)
    smokebox complete -- $words[2..-1] 2>/dev/null
end
complete -c smokebox -a '(__smokebox_complete)'
"""

SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], typer.Argument(help="The shell.")],
) -> int:
    """Print the script that has a shell complete command lines.

    For example, in ~/.bashrc: eval "$(smokebox completion bash)"
    """
    typer.echo(SCRIPTS[shell], nl=False)
    return 0
