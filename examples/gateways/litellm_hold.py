"""A callback of LiteLLM's proxy: before each call it waits until a router permits it, and sends it to the engine named.

``KYB_ROUTER_URL`` is the router's address; ``KYB_ROUTER_KEY`` its key with the scope ``infer``, where it has keys.
"""

import os
from typing import Any

import httpx
from fastapi import HTTPException
from litellm.integrations.custom_logger import CustomLogger

TIMEOUT_SECONDS = 600


class Hold(CustomLogger):
    """Asks ``GET /v1/hold``."""

    def __init__(self) -> None:
        super().__init__()
        key = os.environ.get("KYB_ROUTER_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        url = os.environ.get("KYB_ROUTER_URL", "http://127.0.0.1:8780")
        self._http = httpx.AsyncClient(base_url=url, headers=headers, timeout=TIMEOUT_SECONDS + 10)

    async def async_pre_call_hook(
        self,
        user_api_key_dict: Any,  # noqa: ARG002 - LiteLLM passes all of them by name
        cache: Any,  # noqa: ARG002
        data: dict[str, Any],
        call_type: Any,  # noqa: ARG002
    ) -> dict[str, Any]:
        """Return the call with the engine as its ``api_base``. Raises HTTPException: the router's error."""
        answer = await self._http.get("/v1/hold", params={"model": data["model"], "timeout": f"{TIMEOUT_SECONDS}s"})
        if answer.status_code != 200:
            kept = {name: answer.headers[name] for name in ("Retry-After",) if name in answer.headers}
            raise HTTPException(answer.status_code, answer.json()["error"]["message"], kept)
        return {**data, "api_base": answer.json()["endpoint"] + "/v1"}


hold = Hold()
