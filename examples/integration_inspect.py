"""An Inspect evaluation whose samples run in Smokebox sandboxes."""

import tempfile
import warnings

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import bash

# Inspect leaves a stream open, for which `python -W error` would raise.
warnings.filterwarnings("ignore", "Unclosed <MemoryObject", ResourceWarning)


def scripted_model_outputs() -> list[ModelOutput]:
    """Return scripted outputs, so that the example needs no API key and no network."""
    call = ModelOutput.for_tool_call("scripted", "bash", {"command": "cat secret.txt"})
    reply = ModelOutput.from_content("scripted", "The password is swordfish.")
    call.usage = reply.usage = ModelUsage()
    return [call, reply]


def main() -> None:
    task = Task(
        dataset=[
            Sample(
                input="What is the password?",
                target="swordfish",
                files={"secret.txt": "swordfish"},
            )
        ],
        solver=[use_tools(bash()), generate()],
        scorer=includes(),
        sandbox="smokebox",
    )
    model = get_model("mockllm/model", custom_outputs=scripted_model_outputs())
    with tempfile.TemporaryDirectory() as logs:
        (log,) = eval(task, model=model, log_dir=logs, display="none")
        print(f"status: {log.status}")
        for sample in log.samples or []:
            for message in sample.messages:
                print(f"{message.role:>9}: {message.text or '(calls bash)'}")
            print(f"{'scores':>9}: {[score.value for score in (sample.scores or {}).values()]}")


if __name__ == "__main__":
    main()
