"""Token files and text inputs at URLs: object stores, web servers, and other protocols of fsspec."""
