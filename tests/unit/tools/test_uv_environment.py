"""Settings of pip, translated for uv."""

from __future__ import annotations

from tools.uv_environment import uv_environment


def test_indexes_mirrors_and_certificates_of_pip_are_those_of_uv() -> None:
    listed = (
        ":env:.cert='/etc/ca.pem'\n"
        "global.cert='/etc/other.pem'\n"
        "global.index-url='https://mirror.example/simple'\n"
        "global.extra-index-url='https://one.example/simple\\nfile:///two'\n"
        "install.find-links='/wheels /more'\n"
        "global.trusted-host='mirror.example'\n"
        "global.disable-pip-version-check='1'\n"
    )

    assert uv_environment(listed) == {
        "SSL_CERT_FILE": "/etc/ca.pem",
        "UV_DEFAULT_INDEX": "https://mirror.example/simple",
        "UV_INDEX": "https://one.example/simple file:///two",
        "UV_FIND_LINKS": "/wheels,/more",
        "UV_INSECURE_HOST": "mirror.example",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
    }


def test_without_settings_of_pip_uv_keeps_its_own() -> None:
    assert uv_environment("") == {}


def test_settings_of_other_pip_commands_are_left_out() -> None:
    assert uv_environment("download.index-url='https://elsewhere.example'\n") == {}
