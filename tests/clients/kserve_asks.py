"""A script that tests/clients/installed.py runs in kserve's own environment: its REST client, used
as in its documentation."""

import asyncio
import sys

import numpy as np
from kserve import InferenceRESTClient, InferInput, InferRequest, RESTConfig

ROWS = np.arange(12.0).reshape(4, 3)


async def ask(url: str) -> None:
    client = InferenceRESTClient(RESTConfig(protocol="v2"))
    assert await client.is_server_live(url)
    assert await client.is_server_ready(url)
    assert await client.is_model_ready(url, "total")
    print("health")
    for binary in (False, True):
        given = InferInput("input", [4, 3], "FP64")
        given.set_data_from_numpy(ROWS, binary_data=binary)
        response = await client.infer(
            url, InferRequest(model_name="total", infer_inputs=[given]), model_name="total"
        )
        np.testing.assert_array_equal(response.outputs[0].as_numpy(), ROWS.sum(axis=1))
        print("infer (binary)" if binary else "infer (JSON)")
    factors = np.arange(4.0)
    given = [InferInput("x", [4, 3], "FP64"), InferInput("factor", [4], "FP64")]
    for one, values in zip(given, (ROWS, factors), strict=True):
        one.set_data_from_numpy(values, binary_data=True)
    request = InferRequest(model_name="scaled", infer_inputs=given)
    response = await client.infer(url, request, model_name="scaled")
    found = {one.name: one.as_numpy() for one in response.outputs}
    np.testing.assert_array_equal(found["scaled"], ROWS * factors[:, None])
    np.testing.assert_array_equal(found["total"], (ROWS * factors[:, None]).sum(axis=1))
    print("named tensors")
    await client.close()


if __name__ == "__main__":
    asyncio.run(ask(sys.argv[1]))
