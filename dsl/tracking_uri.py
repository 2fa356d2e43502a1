"""Where MLflow runs are kept: the kinds of addresses that MLflow knows; another is told before anything runs."""

from __future__ import annotations

import re

from dsl.errors import ConfigError, did_you_mean

DATABASES = ("sqlite", "postgresql", "mysql", "mssql")  # with the name of a driver too: mysql+pymysql
SCHEMES = (*DATABASES, "http", "https", "file", "databricks", "databricks-uc", "uc")
SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9.-]*)(\+\w+)?:")


def check_tracking_uri(uri: str) -> None:
    """Raises ConfigError for a scheme that neither MLflow nor an installed plugin of it has. A path has none."""
    found = SCHEME.match(uri)
    if found is None:
        return
    scheme, driver = found[1].lower(), found[2]
    if scheme in SCHEMES and (driver is None or scheme in DATABASES):
        return
    from importlib.metadata import entry_points  # slow to import

    if entry_points(group="mlflow.tracking_store", name=scheme):
        return
    hint = did_you_mean(scheme, SCHEMES) or f"it knows {', '.join(SCHEMES)}"
    raise ConfigError(f'MLflow knows no tracking server of the kind "{found[0]}" ({hint})')
