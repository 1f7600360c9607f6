"""Inputs, outputs and the Open Inference Protocol, whatever the transport."""
