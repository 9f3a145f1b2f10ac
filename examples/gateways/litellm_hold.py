"""A callback of LiteLLM's proxy: before a call it waits until a router permits it, and sends it to the engine named.

LiteLLM runs it for the calls of all models. ``KYB_ROUTER_MODELS`` names those that the router serves, as the proxy's
``model_name`` and the router know them, such as ``llama,qwen``; calls of others are left as they are.
``KYB_ROUTER_URL`` is the router's address; ``KYB_ROUTER_KEY`` its key with the scope ``gateway``, where it has keys.
"""

import os
from typing import Any

import aiohttp
from fastapi import HTTPException
from litellm.integrations.custom_logger import CustomLogger

TIMEOUT_SECONDS = 600


class Hold(CustomLogger):
    """Asks ``GET /v1/hold``."""

    def __init__(self) -> None:
        super().__init__()
        key = os.environ.get("KYB_ROUTER_KEY")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._url = os.environ.get("KYB_ROUTER_URL", "http://127.0.0.1:8780") + "/v1/hold"
        self._models = [name.strip() for name in os.environ.get("KYB_ROUTER_MODELS", "").split(",")]

    async def async_pre_call_hook(
        self,
        user_api_key_dict: Any,  # noqa: ARG002 - LiteLLM passes all of them by name
        cache: Any,  # noqa: ARG002
        data: dict[str, Any],
        call_type: Any,  # noqa: ARG002
    ) -> dict[str, Any]:
        """Return the call with the engine as its ``api_base``. Raises HTTPException: the router's error."""
        model = data.get("model")
        if not model or model not in self._models:
            return data
        query, patience = (
            {"model": model, "timeout": f"{TIMEOUT_SECONDS}s"},
            aiohttp.ClientTimeout(TIMEOUT_SECONDS + 10),
        )
        async with (
            aiohttp.ClientSession(headers=self._headers, timeout=patience) as http,
            http.get(self._url, params=query) as answer,
        ):
            body = await answer.json()
        if answer.status != 200:
            kept = {name: answer.headers[name] for name in ("Retry-After",) if name in answer.headers}
            raise HTTPException(answer.status, body["error"]["message"], kept)
        return {**data, "api_base": body["endpoint"] + "/v1"}


hold = Hold()
