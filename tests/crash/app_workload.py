"""An app to be killed: app_workload.py FOLDER PORT."""

from __future__ import annotations

import sys

import uvicorn

from smokebox.app import create_app

uvicorn.run(create_app(sys.argv[1]), port=int(sys.argv[2]), log_level="warning")
