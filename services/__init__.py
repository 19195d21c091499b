"""The four services. They meet in `shared` and on the wire, and never import each other."""
