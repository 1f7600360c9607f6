"""Work that a node does again and again, alone or as the elected leader of its mesh."""
