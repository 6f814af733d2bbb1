"""Other engines beside this one: `python -m examples.compare --against transformers,openvino`."""
