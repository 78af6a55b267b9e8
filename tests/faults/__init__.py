"""What can go wrong in a request, enumerated: see harness.py for the tool and scene.py for what it is pointed at here."""
