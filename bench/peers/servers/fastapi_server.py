"""FastAPI on uvicorn: no batching."""

import sys

import uvicorn
from fastapi import FastAPI
from models import MODELS
from pydantic import BaseModel

app = FastAPI()


class Inputs(BaseModel):
    input: list[float]


@app.post("/{name}")
async def predict(name: str, request: Inputs) -> dict[str, float]:
    return {"output": MODELS[name]([request.input])[0]}


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error", access_log=False)
