from typing import Any
Chat = Any
