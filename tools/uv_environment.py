"""Print pip's settings as those of uv, as lines for a shell: indexes, mirrors, certificates.

uv reads neither pip.conf nor PIP_ variables. Machines whose pip uses a mirror have their settings
there.
"""

from __future__ import annotations

import shlex
import subprocess
import sys

# uv's variable by pip's option. Lists are separated by spaces or lines in pip.
NAMES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "constraint": "UV_CONSTRAINT",
    "trusted-host": "UV_INSECURE_HOST",
    "no-index": "UV_NO_INDEX",
    "cert": "SSL_CERT_FILE",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "timeout": "UV_HTTP_TIMEOUT",
}
SEPARATORS = {"UV_FIND_LINKS": ","}


def uv_environment(pip_config: str) -> dict[str, str]:
    """Translate the output of `pip config list`, which has the strongest source first."""
    found: dict[str, str] = {}
    for line in pip_config.splitlines():
        key, _, value = line.partition("=")
        source, _, option = key.partition(".")
        name = NAMES.get(option)
        if source in {"global", "install", ":env:"} and name is not None:
            separator = SEPARATORS.get(name, " ")
            found.setdefault(name, separator.join(value.strip("'\"").replace("\\n", " ").split()))
    if found:
        found["UV_INDEX_STRATEGY"] = "unsafe-best-match"  # all indexes are equal, as for pip
    return found


def main() -> None:
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for name, value in uv_environment(listed).items():
        print(f"export {name}={shlex.quote(value)}")


if __name__ == "__main__":
    main()
