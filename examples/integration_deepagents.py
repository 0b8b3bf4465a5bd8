"""A deep agent whose files and shell are a virtual sandbox."""

from collections.abc import Iterator

from deepagents import create_deep_agent
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, ToolCall

from smokebox import virtual
from smokebox.integrations.deepagents import SmokeboxBackend

SALES = "month,units\njan,12\nfeb,30\nmar,25\n"


class ScriptedModel(GenericFakeChatModel):
    """Scripted model, so that the example needs no API key and no network."""

    def bind_tools(self, tools: object, **options: object) -> "ScriptedModel":
        return self


def script() -> Iterator[AIMessage]:
    command = "awk -F, 'NR > 1 {sum += $2} END {print sum}' sales.csv"
    report = {"file_path": "/workspace/report.md", "content": "67 units were sold.\n"}
    yield AIMessage("", tool_calls=[ToolCall(name="execute", args={"command": command}, id="1")])
    yield AIMessage("", tool_calls=[ToolCall(name="write_file", args=report, id="2")])
    yield AIMessage("I wrote the report.")


def main() -> None:
    sandbox = virtual(files={"/workspace/sales.csv": SALES})
    with SmokeboxBackend(sandbox) as backend:
        agent = create_deep_agent(model=ScriptedModel(messages=script()), backend=backend)
        question = {"role": "user", "content": "Sum up the sales and write a report."}
        state = agent.invoke({"messages": [question]})
        for message in state["messages"]:
            print(f"{message.type:>5}: {message.text or [c['name'] for c in message.tool_calls]}")
        print("-----", backend.execute("cat report.md").output, sep="\n")


if __name__ == "__main__":
    main()
