"""One file a policy: what ReCycle and its peers do when workers come and go."""
