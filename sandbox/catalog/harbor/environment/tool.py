"""The task's tools as a command: ``tool.py NAME '{"key": value}' APP``; see the Dockerfile.

``tool.py --setup DATA.json APP`` builds the world, ``tool.py --end-state APP`` prints it as JSON.
"""

import importlib.util
import json
import sys
import types
from pathlib import Path


def load_tools(folder: Path) -> types.ModuleType:
    """The toolkit under the name tools.py imports it by."""
    spec = importlib.util.spec_from_file_location("sandbox.toolkit", folder / "toolkit.py")
    assert spec is not None and spec.loader is not None, f"{folder}/toolkit.py is missing"
    toolkit = importlib.util.module_from_spec(spec)
    sys.modules["sandbox"] = types.ModuleType("sandbox")
    sys.modules["sandbox.toolkit"] = toolkit
    spec.loader.exec_module(toolkit)
    return toolkit


def main(arguments: list[str]) -> int:
    """Exit status 1 when a tool refuses; its reason is on standard error."""
    here = Path(__file__).parent
    toolkit = load_tools(here)
    module = toolkit.TaskModule((here / "tools.py").read_text(encoding="utf-8"), "tools.py")
    name, app = arguments[0], Path(arguments[-1]).resolve()
    if name == "--setup":
        module.setup(app, json.loads(Path(arguments[1]).read_text(encoding="utf-8")))
    elif name == "--end-state":
        sys.stdout.write(json.dumps(module.end_state(app)))
    else:
        try:
            text = module.call(app, name, json.loads(arguments[1]) if len(arguments) > 2 else {})
        except toolkit.ToolError as refusal:
            sys.stderr.write(f"{refusal}\n")
            return 1
        sys.stdout.write(f"{text}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
