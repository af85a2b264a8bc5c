"""Abort incomplete multipart uploads, which killed writers leave behind, if boto3 is installed.

obstore cannot list them. Without boto3 a lifecycle rule of the bucket
(AbortIncompleteMultipartUpload) aborts them, as docs/object_stores.md says.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from datetime import datetime
from typing import Any

from holdfast.storage.objects.address import Address


def abort_uploads(address: Address, before: datetime, used: Collection[str]) -> int:
    """Abort the uploads under a root that started before a time, except under prefixes in use.

    Returns the number of aborted uploads, 0 without boto3.
    """
    client = _client(address)
    if client is None:
        return 0
    bucket, prefix = address.bucket, address.prefix
    stale: list[tuple[str, str]] = []
    pages = client.get_paginator("list_multipart_uploads").paginate(
        Bucket=bucket, Prefix=f"{prefix}/" if prefix else ""
    )
    for page in pages:
        for upload in page.get("Uploads", []):
            relative = upload["Key"].removeprefix(f"{prefix}/")
            is_used = relative.partition("/")[0] in used
            if relative.startswith(".attempt-") and upload["Initiated"] <= before and not is_used:
                stale.append((upload["Key"], upload["UploadId"]))
    for key, upload_id in stale:
        with contextlib.suppress(client.exceptions.NoSuchUpload):  # completed or aborted meanwhile
            client.abort_multipart_upload(Bucket=bucket, Key=key, UploadId=upload_id)
    return len(stale)


def _client(address: Address) -> Any | None:
    if not address.url.startswith("s3"):
        return None
    try:
        import boto3  # type: ignore[import-untyped, import-not-found, unused-ignore]
        from botocore import UNSIGNED  # type: ignore[import-untyped, import-not-found, unused-ignore]
        from botocore.config import Config  # type: ignore[import-untyped, import-not-found, unused-ignore]
    except ImportError:
        return None
    unsigned = os.environ.get("AWS_SKIP_SIGNATURE", "").lower() in ("1", "true")
    config = Config(
        connect_timeout=address.timeout_s,
        read_timeout=address.timeout_s,
        retries={"total_max_attempts": 3},
        s3={"addressing_style": "path"} if _endpoint() else {},
        **({"signature_version": UNSIGNED} if unsigned else {}),
    )
    return boto3.client(
        "s3",
        endpoint_url=_endpoint(),
        region_name=os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1",
        config=config,
    )


def _endpoint() -> str | None:
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT")
