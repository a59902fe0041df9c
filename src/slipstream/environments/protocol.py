from typing import Any
ChatMessage = dict[str, Any]
