"""The server: who may ask (`guard`), what is answered (`routes`), what is pushed (`page_stream`), and its process (`serve`)."""
