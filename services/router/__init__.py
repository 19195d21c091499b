"""The endpoint picker: answers Envoy's ext-proc for every request with the endpoints, in the order to try them."""
