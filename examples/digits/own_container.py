"""A model class, served by a process that you start on any host that reaches the server.

    clipper-container serve own_container:Brightness --name brightness --connect ADDRESS

`clipper up` prints the address and the token.
"""

from typing import Any

import numpy as np

from clipper_container import Model


class Brightness(Model):
    """The mean gray level of an image."""

    input = "f64[64]"
    output = "f64"

    def load(self) -> None:  # once, in this process: open files, sockets and devices here
        self.full = 16.0

    def predict_batch(
        self, inputs: Any
    ) -> Any:  # an array of shape (n, 64), aligned and not copied
        return np.mean(inputs, axis=1) / self.full  # n numbers
