"""`dflow report`: what runs did, as one HTML file."""
