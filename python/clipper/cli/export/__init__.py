"""Commands that write files, images and manifests for other tools."""
