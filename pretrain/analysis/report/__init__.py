"""Report on runs as an HTML page, live or as a file, and as a comparison in text or JSON (`ds-pretrain report`)."""
